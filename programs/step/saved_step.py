"""Saves the programs of a training run as text, and loads them without planning again."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import fields
from typing import Any

from tpshard.parallelism import program_file
from tpshard.parallelism.pipeline.schedules import StageTask, Table, check
from tpshard.parallelism.pipeline.stages import Stage
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.device_programs import DevicePrograms
from tpshard.programs.step.staged import table_of
from tpshard.programs.step.training_step import TrainingPrograms

_MOST_BYTES = 4 << 30
"""Of the JSON of a step; that of a model of 405 billion parameters has a twentieth."""

CLASSES = (DevicePrograms, Stage, StageTask, Table)


def pack(programs: TrainingPrograms) -> str | None:
    """Serializes everything that a run executes, its evaluation included: JSON (`parallelism.program_file`),
    compressed, in base64.

    None where an argument of an operation has no form in JSON: such a plan can be read, but not run.
    """
    parts = {field.name: getattr(programs, field.name) for field in fields(programs) if field.name != "setting"}
    parts |= {"evaluation": programs.evaluation, "share": programs.share}
    try:
        text = json.dumps(program_file.dump(parts, CLASSES), separators=(",", ":"))
    except TypeError:
        return None
    return base64.b64encode(zlib.compress(text.encode())).decode("ascii")


def unpack(text: str, setting: Setting) -> TrainingPrograms:
    """The programs in `text`, for the setting they were built for. ValueError for an invalid text."""
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
        if not stream.eof:
            raise ValueError(f"it is cut off, or larger than {_MOST_BYTES >> 30} GiB")
        parts = program_file.load(json.loads(data), CLASSES)
        return _programs(parts, setting)
    except (zlib.error, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _programs(parts: Any, setting: Setting) -> TrainingPrograms:
    evaluation, share = parts.pop("evaluation"), parts.pop("share")
    programs = TrainingPrograms(setting, **parts)
    shapes = {port.name: port.shape for port in programs.micro.inputs if port.kind == "parameter"}
    if shapes != {name: tuple(p.shape) for name, p in setting.model.named_parameters()}:
        raise ValueError("its parameters are not those of the model")
    if setting.recipe.staged:
        check(programs.table)
    elif programs.cuts or programs.table != table_of(setting):
        raise ValueError("its schedule is not that of the recipe")
    programs.__dict__.update(evaluation=evaluation, share=share)
    return programs
