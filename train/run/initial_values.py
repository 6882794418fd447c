"""The values from which a run begins: its model's own, or those of another run or folder (`train.init_from`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.adapters.adapted_model import AdaptedModel
from tpshard.models.adapters.peft_folder import PeftFolder, is_peft
from tpshard.models.folders.new_tokens import widened
from tpshard.models.model_spec import ModelSpec
from tpshard.models.open_model import from_json, open_model
from tpshard.programs.fit.recipe_model import carried_instead
from tpshard.programs.fit.wrong_model import wrong_model
from tpshard.recipes.keys.schema import Recipe
from tpshard.train.checkpoints.checkpoint import OPTIMIZER
from tpshard.train.checkpoints.checkpoint_drafts import MANIFEST
from tpshard.train.checkpoints.restore import Damaged, SavedCheckpoint, newest, open_checkpoint
from tpshard.train.run.training_engine import InitialBlock, ReadBlock


def begun_from(recipe: Recipe) -> str | None:
    """The absolute place that a run began from, for its checkpoints; None for its model."""
    return None if recipe.train.init_from is None else os.path.abspath(recipe.train.init_from)


def initial_values(recipe: Recipe, spec: ModelSpec) -> InitialBlock:
    """The reader of initial values, whose errors are mistakes of the recipe; weights are opened at once.

    A run that goes on needs no weights of the folder that it began from, which may be gone, unless its checkpoints
    leave them out.
    """
    gone = carried_instead(recipe) is not None
    named, place = recipe.model, recipe.train.init_from

    def block(
        name: str, starts: Sequence[int], sizes: Sequence[int], *, seed: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if name in others:
            try:
                value = others[name](name, starts, sizes)
            except (ValueError, OSError, Damaged) as error:
                raise _cannot_begin(recipe, error) from error
            return value if dtype is None else value.to(dtype)
        if gone:
            why = f"{getattr(named, spec.source.key)} is gone, and no checkpoint of the run has its weights"
            raise wrong_model(recipe, ValueError(why))
        try:
            return spec.initial_block(name, starts, sizes, seed, dtype)
        except ValueError as error:
            raise wrong_model(recipe, error) from error

    try:
        gone or spec.weights  # noqa: B018 (raises)
    except (ValueError, OSError) as error:
        raise wrong_model(recipe, error) from error
    others: Mapping[str, ReadBlock] = {} if place is None else begin(recipe, place, spec)
    return block


def begin(recipe: Recipe, place: str, spec: ModelSpec) -> dict[str, ReadBlock]:
    """`values_of` of `train.init_from`, of which headers alone are read. Mistakes (exit 7) where a run cannot begin
    from it."""
    try:
        return values_of(Path(place), spec)
    except (ValueError, OSError, Damaged) as error:
        raise _cannot_begin(recipe, error) from error


def _cannot_begin(recipe: Recipe, error: Exception) -> Mistakes:
    return Mistakes.one(
        f"a run cannot begin from {recipe.train.init_from}", exit=Exit.CHECKPOINT,
        where=recipe.where("train.init_from"), why=str(error), fix="a run, a checkpoint or a folder of the same model",
    )  # fmt: skip


def values_of(place: Path, spec: ModelSpec) -> dict[str, ReadBlock]:
    """For each parameter of a model that a run, a checkpoint or a folder has, the reader of its blocks.

    Adapters that it lacks are drawn, and a base that a run with adapters leaves out is the model's own. ValueError for
    what is of another model.
    """
    if is_peft(place):
        return _of_adapters(place, spec)
    if (place / MANIFEST).is_file() or (place / "checkpoints").is_dir():
        return _of_checkpoint(place, spec)
    if not place.is_dir():
        raise ValueError(f"{place} is no folder")
    if spec.packed:
        raise ValueError("the base of the adapters is quantized, and begins with its own weights")
    base = spec.plain
    other = open_model(place)
    if other.weights is None:
        raise ValueError(f"{place} holds no weights")
    read = widened(other.weights.block, other.shapes, base.shapes, (other.vocab, base.vocab))
    return dict.fromkeys(base.shapes, read)


def _of_adapters(place: Path, spec: ModelSpec) -> dict[str, ReadBlock]:
    if not isinstance(spec, AdaptedModel) or spec.lora is None:
        raise ValueError("it holds adapters, and the recipe has none: adapters.lora")
    theirs = PeftFolder.of(place, spec.base)
    for path in dict.fromkeys((*spec.adapters, *theirs.spec.adapters)):
        own, other = spec.adapters.get(path), theirs.spec.adapters.get(path)
        if own is None or other is None or (own.rank, own.scaling, own.dora) != (other.rank, other.scaling, other.dora):
            shown = [None if one is None else f"rank {one.rank}, scaling {one.scaling:g}" for one in (other, own)]
            raise ValueError(f"`{path}` has {shown[0] or 'no adapter'} there and {shown[1] or 'none'} here")
    if set(theirs.spec.saved) != set(spec.saved):
        raise ValueError("`modules_to_save` are others there than here")
    return dict.fromkeys(theirs.places, theirs.block)


def _of_checkpoint(place: Path, spec: ModelSpec) -> dict[str, ReadBlock]:
    checkpoint: SavedCheckpoint | None
    checkpoint = open_checkpoint(place) if (place / MANIFEST).is_file() else newest(place / "checkpoints")
    if checkpoint is None:
        raise ValueError(f"there is no checkpoint in {place / 'checkpoints'}")
    saved = {name: one.shape for name, one in checkpoint.tensors.items() if not name.startswith(OPTIMIZER)}
    adapted = "adapters" in checkpoint.meta.get("model", {})
    if adapted and not (isinstance(spec, AdaptedModel) and spec.lora is not None):
        raise ValueError("it is a run with adapters, and the recipe has none: `tpshard convert --merge` first")
    optional = {*spec.left_out, *spec.added} if adapted else set(spec.added)
    shapes = {name: shape for name, shape in spec.shapes.items() if name in saved or name not in optional}
    vocab = from_json(checkpoint.meta["model"]).vocab if "model" in checkpoint.meta else None
    return dict.fromkeys(saved, widened(checkpoint.block, saved, shapes, (vocab, spec.vocab)))
