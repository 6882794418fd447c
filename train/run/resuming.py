"""Which keys of a recipe a run may change when it is resumed, and the refusal that names the others."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpshard.diagnostics.diagnostic import Exit, Mistakes, plural
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import load
from tpshard.recipes.reading.merge import NO_FILES
from tpshard.recipes.reading.values import hashed, shorten, values
from tpshard.recipes.text.write import as_data, dump
from tpshard.train.checkpoints.restore import Damaged, SavedCheckpoint, steps
from tpshard.train.checkpoints.store_path import Location

UNTOLD = (
    "schema", "name", "evaluate", "timeout_s", "launch", "run", "resume", "checkpoint", "logging", "quantize", "serve",
)  # fmt: skip
"""Sections in which a change is not recorded: they do not say what a step computes."""
FREE = (
    "cluster", "mesh", "sharding", "fsdp", "remat", "offload", "compile", "pipeline", "batch.per_device", "loss.chunks",
    "train.steps", "train.tokens", "data.epochs", "train.on_nonfinite", "train.profile", "data.bad_rows",
    "schedule.decay_steps",
)  # fmt: skip
"""Keys and sections that may change: where and how the same steps are computed, and how many. Where the end of the
schedule changes the next step's learning rate, the loop shows both."""
PATHS = ("data.source", "data.tokenizer", "model.hf", "model.transformers", "train.init_from")
"""Keys that name files. They differ where both the text and the file differ; the data's contents are compared too."""

Changes = Mapping[str, tuple[Any, Any]]
"""For each key that differs, the value before and now."""


def trained(recipe: Recipe) -> dict[str, Any]:
    """The recipe's values that checkpoints keep, to be compared when the run is resumed."""
    kept = values(recipe, UNTOLD)
    for key in PATHS:
        section, name = key.split(".")
        if kept.get(key) is not None:
            try:
                file = os.path.abspath(getattr(getattr(recipe, section), name))
            except Mistakes:  # its environment variable is not set
                file = ""
            written = as_data(getattr(recipe, section))[name]
            kept[key] = {"written": written, "file": hashed(file)}
    if sources := kept.get("data.sources"):
        kept["data.sources"] = [{**one, "source": _absolute(one["source"])} for one in sources]
    return kept


def changes(folder: Path, checkpoints: Location, recipe: Recipe) -> Changes:
    """What the recipe changes of the run in `folder`: of its newest checkpoint, or else of its recipe.yaml. A key that
    the run was without, being older, and that the recipe does not write, changes nothing."""
    before, now = _before(folder, checkpoints), trained(recipe)
    if before is None:
        return {}
    derived = {"schedule.warmup_steps", "schedule.decay_steps"} if recipe.data.epochs else set()  # of steps to count
    return {
        key: (_shown(before.get(key)), _shown(now.get(key)))
        for key in dict.fromkeys((*now, *before))
        if not _same(before.get(key), now.get(key)) and (key in before.keys() - derived or recipe.where(key).line)
    }


def refuse(folder: Location, recipe: Recipe, changed: Changes) -> None:
    """Raises `Mistakes` (exit 7) that names every change to the run in `folder` that makes it another run."""
    named = [key for key in changed if not any(key == free or key.startswith(f"{free}.") for free in FREE)]
    if not recipe.where("schedule.warmup_steps").line:  # derived from train.steps, which is free
        named = [key for key in named if key != "schedule.warmup_steps"]
    if not named:
        return
    (where, why), *also = (
        (recipe.where(key), f"`{key}: {shorten(changed[key][1])}`, trained with {shorten(changed[key][0])}")
        for key in named
    )
    raise Mistakes.one(
        f"{folder} cannot be resumed: {plural(len(named), 'key')} of the recipe changed, {', '.join(named)}",
        exit=Exit.CHECKPOINT, where=where, why=why, also=tuple(also),
        fix=f"`tpshard train {folder}` continues it as it was; resume=force continues it with the changes; "
        "run.dir=DIR starts another run",
    )  # fmt: skip


def kept_recipe(recipe: Recipe) -> str:
    """The recipe.yaml of a run: without `resume`, and without a `force` that was meant for one command.

    Names of files that are there are absolute: the run's folder may be named from another working directory.
    """
    data = as_data(recipe)
    data.pop("resume", None)
    for section, name in (key.split(".") for key in PATHS):
        if name in data.get(section, {}):
            data[section] = {**data[section], name: _absolute(data[section][name])}
    if sources := data["data"].get("sources"):
        data["data"] = {**data["data"], "sources": [{**one, "source": _absolute(one["source"])} for one in sources]}
    if data["checkpoint"]["resume"] == "force":
        data["checkpoint"] = {**data["checkpoint"], "resume": "auto"}
    return dump(data)


def _absolute(file: Any) -> Any:
    """The absolute name of a file or folder that is there, or of a pattern of such; anything else as it is."""
    named = isinstance(file, str) and file not in NO_FILES and "${" not in file
    named = named and (os.path.exists(file) or any(glob.iglob(file)))
    return os.path.abspath(file) if named else file


def _before(folder: Path, checkpoints: Location) -> Mapping[str, Any] | None:
    """The values that the run was trained with, as its newest readable checkpoint or else its recipe.yaml says."""
    for path in reversed(steps(checkpoints).values()):
        try:
            meta = SavedCheckpoint(path).meta
        except Damaged:
            continue
        if "trained" in meta:
            return dict(meta["trained"])
        break
    try:
        return trained(load(folder / "recipe.yaml"))
    except Mistakes:  # there is none, or a later version wrote it
        return None


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, Mapping) and isinstance(now, Mapping) and "written" in before and "written" in now:
        return bool(before["written"] == now["written"] or before["file"] == now["file"])
    return bool(before == now)


def _shown(value: Any) -> Any:
    return value["written"] if isinstance(value, Mapping) and "written" in value else value
