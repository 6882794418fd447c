"""Saves the programs of a training run as text, and loads them without planning again."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from tpshard.parallelism import program_file
from tpshard.parallelism.pipeline.schedules import StageTask, Table, check
from tpshard.parallelism.pipeline.stages import Stage
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.staged import DevicePrograms, StagedPrograms
from tpshard.programs.step.training import TrainingPrograms

_MOST_BYTES = 4 << 30
"""Of the JSON of a step; that of a model of 405 billion parameters has a twentieth."""

CLASSES = (DevicePrograms, Stage, StageTask, Table)


def pack(programs: TrainingPrograms) -> str | None:
    """Serializes everything that a run executes, its evaluation included: JSON (`parallelism.program_file`),
    compressed, in base64.

    None where an argument of an operation has no form in JSON: such a plan can be read, but not run.
    """
    parts: dict[str, Any] = {
        "micro": programs.micro, "update": programs.update, "storage": programs.storage,
        "gather": programs.gather, "reduce": programs.reduce,
    }  # fmt: skip
    if (pipeline := programs.pipeline) is None:
        parts["evaluate"] = programs.evaluate
    else:
        parts["pipeline"] = {
            "axis": pipeline.axis, "table": pipeline.table, "layers": pipeline.layers, "stages": pipeline.stages,
            "devices": pipeline.devices, "evaluation": pipeline.evaluation, "share": pipeline.share,
        }  # fmt: skip
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
    programs = TrainingPrograms(setting, *(parts[key] for key in ("micro", "update", "storage", "gather", "reduce")))
    shapes = {port.name: port.shape for port in programs.micro.inputs if port.kind == "parameter"}
    if shapes != {name: tuple(p.shape) for name, p in setting.model.named_parameters()}:
        raise ValueError("its parameters are not those of the model")
    if setting.recipe.staged:
        staged = parts["pipeline"]
        own = {name: staged[name] for name in ("axis", "table", "layers", "stages", "devices")}
        programs.pipeline = StagedPrograms(setting, storage=programs.storage, **own)
        check(programs.pipeline.table)
        programs.pipeline.__dict__.update(evaluation=staged["evaluation"], share=staged["share"])
    else:
        programs.__dict__["evaluate"] = parts["evaluate"]
    return programs
