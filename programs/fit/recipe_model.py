"""The model that a recipe names, with a mistake at the recipe's line where it cannot be had."""

from __future__ import annotations

import os

from tpshard.models.model_spec import ModelSpec
from tpshard.models.open_model import open_model
from tpshard.programs.fit.wrong_model import wrong_model
from tpshard.recipes.keys.model_keys import Model
from tpshard.recipes.keys.schema import Recipe

MOST = 4
"""The number of opened models that are remembered, the last ones."""
_opened: dict[object, ModelSpec] = {}


def model_of(recipe: Recipe, *, weights: bool = True) -> ModelSpec:
    """The model of a recipe's `model` section (see `open_model`). Mistakes, exit 3, where it cannot be had."""
    try:
        return opened(recipe.model, weights=weights)
    except (ValueError, OSError) as error:
        raise wrong_model(recipe, error) from error


def opened(section: Model, *, weights: bool = True) -> ModelSpec:
    """`open_model`, once for the many variants of a recipe that a search plans, as long as the folder's files are the
    same: comparing a folder's tensors with its class builds the class. Errors as in `open_model`."""
    folder = getattr(section, section.named_by) if section.named_by in section.paths else None
    key = (repr(section), weights, folder, None if folder is None else _stamp(folder))
    if key in _opened:
        return _opened[key]
    spec = open_model(section, weights=weights)
    if not spec.reads_code:
        while len(_opened) >= MOST:
            del _opened[next(iter(_opened))]
        _opened[key] = spec
    return spec


def _stamp(folder: str) -> tuple[tuple[object, ...], ...]:
    """The names, kinds, sizes and times of what lies in a folder; nothing of what is no folder."""
    if not os.path.isdir(folder):
        return ()
    stamps: list[tuple[object, ...]] = []
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        state = os.stat(path) if os.path.exists(path) else os.lstat(path)
        stamps.append((name, state.st_mode, state.st_size, state.st_mtime_ns, state.st_ino))
    return tuple(stamps)
