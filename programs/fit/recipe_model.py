"""The model that a recipe names, with a mistake at the recipe's line where it cannot be had."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.kernels.quantized.gptq_config import GPTQConfig
from tpshard.models.adapters.adapted_model import AdaptedModel
from tpshard.models.adapters.lora import ALL_LINEAR, Lora
from tpshard.models.adapters.packed_model import PackedModel
from tpshard.models.folders.folder_files import carried
from tpshard.models.model_spec import ModelSpec
from tpshard.models.open_model import open_model
from tpshard.programs.fit.wrong_model import wrong_model
from tpshard.recipes.keys.schema import Recipe

MOST = 4
"""The number of opened models that are remembered, the last ones."""
_opened: dict[object, ModelSpec] = {}


def model_of(recipe: Recipe, *, weights: bool = True) -> ModelSpec:
    """The model of a recipe's `model` section (see `open_model`). Mistakes, exit 3, where it cannot be had."""
    try:
        return opened(recipe, weights=weights)
    except (ValueError, OSError) as error:
        raise wrong_model(recipe, error) from error


def opened(recipe: Recipe, *, weights: bool = True) -> ModelSpec:
    """`open_model` of a recipe's model, or of what its run carries where the folder is gone. Errors as there.

    It is opened once for the many variants of a recipe that a search plans, as long as the folder's files are the same:
    comparing a folder's tensors with its class builds the class.
    """
    section, instead = recipe.model, carried_instead(recipe)
    folder = instead or (getattr(section, section.named_by) if section.named_by in section.paths else None)
    said = tuple(map(repr, (section, recipe.adapters, recipe.train.freeze, _planned(recipe))))
    key = (said, weights, folder, None if folder is None else _stamp(folder))
    if key in _opened:
        return _opened[key]
    spec = adapted(open_model(section, weights=weights, instead=instead), recipe, check=weights)
    if not spec.reads_code:
        while len(_opened) >= MOST:
            del _opened[next(iter(_opened))]
        _opened[key] = spec
    return spec


def adapted(base: ModelSpec, recipe: Recipe, *, check: bool = True) -> ModelSpec:
    """A model with what the recipe freezes, and with its adapters. check: also where that imports torch."""
    freeze, section = recipe.train.freeze, recipe.adapters.lora
    if not freeze and section is None:
        return base
    lora = None
    if section is not None:
        values = {item.name: getattr(section, item.name) for item in fields(section)}
        if section.targets == (ALL_LINEAR,):
            values["targets"] = ALL_LINEAR
        lora = Lora(**values)
        base = packed(base, recipe)
    spec = AdaptedModel(base, lora, freeze)
    if check or base.outline is not None:
        spec.check()
    return spec


def packed(base: ModelSpec, recipe: Recipe) -> ModelSpec:
    """A base of adapters, whose weights stay packed if it is a quantized folder, or a preset that stands for one."""
    if base.source.key != "preset":
        return PackedModel.of_folder(base)
    if (planned := _planned(recipe)) is None:
        return base
    return PackedModel(base, planned)


def _planned(recipe: Recipe) -> GPTQConfig | None:
    section = recipe.quantize
    if not recipe.adapters.packed:
        return None
    return GPTQConfig(section.bits, section.group_size, section.order != "none", section.sym)


def carried_instead(recipe: Recipe) -> Path | None:
    """What the recipe's run carries of the folder of its model, where that folder is gone; else None."""
    key = recipe.model.named_by
    if key not in recipe.model.paths:
        return None
    try:
        gone = not os.path.exists(getattr(recipe.model, key))
    except Mistakes:  # its environment variable is not set
        gone = True
    place = carried_by(recipe)
    return place if gone and (place / "config.json").is_file() else None


def carried_by(recipe: Recipe) -> Path:
    """Where the run of a recipe carries what it began from: beside the recipe, if that is a run's, a checkpoint's or a
    copy of what a run has in a store, else in the run's folder."""
    beside = Path(recipe.file).parent
    own = Path(recipe.file).is_file() and any(
        (beside / name).exists() for name in ("checkpoints", "manifest.json", ".store.json")
    )
    return carried(beside if own and carried(beside).is_dir() else recipe.run.folder)


def _stamp(folder: str | Path) -> tuple[tuple[object, ...], ...]:
    """The names, kinds, sizes and times of what lies in a folder; nothing of what is no folder."""
    if not os.path.isdir(folder):
        return ()
    stamps: list[tuple[object, ...]] = []
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        state = os.stat(path) if os.path.exists(path) else os.lstat(path)
        stamps.append((name, state.st_mode, state.st_size, state.st_mtime_ns, state.st_ino))
    return tuple(stamps)
