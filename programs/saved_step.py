"""Saves the programs of a training run as text, and loads them without planning again."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from tpshard.parallelism import program_file
from tpshard.parallelism.pipeline.schedules import StageTask, Table
from tpshard.parallelism.pipeline.stages import Stage
from tpshard.programs.setting import Setting
from tpshard.programs.staged import DevicePrograms, StagedPrograms
from tpshard.programs.training import TrainingPrograms

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
        data = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
    except zlib.error as error:
        raise ValueError(str(error)) from error
    parts = program_file.load(data, CLASSES)
    programs = TrainingPrograms(setting, *(parts[key] for key in ("micro", "update", "storage", "gather", "reduce")))
    if "pipeline" not in parts:
        programs.__dict__["evaluate"] = parts["evaluate"]
        return programs
    later = {key: parts["pipeline"].pop(key) for key in ("evaluation", "share")}
    programs.pipeline = StagedPrograms(setting, storage=programs.storage, **parts["pipeline"])
    programs.pipeline.__dict__.update(later)
    return programs
