"""The values from which a run begins: its model's own, or those of another run or folder (`train.init_from`)."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.files.folder_json import FolderError
from tpshard.models.adapters.adapted_model import AdaptedModel
from tpshard.models.adapters.lora import Adapter, Lora
from tpshard.models.adapters.peft_config import config_of
from tpshard.models.adapters.peft_folder import PeftFolder, is_peft
from tpshard.models.folders.new_tokens import widened
from tpshard.models.model_spec import ModelSpec
from tpshard.models.open_model import from_json, open_alike
from tpshard.parallelism.runtime.context import Context
from tpshard.programs.fit.recipe_model import carried_instead
from tpshard.programs.fit.wrong_model import wrong_model
from tpshard.recipes.keys.schema import Recipe
from tpshard.train.checkpoints.checkpoint import OPTIMIZER
from tpshard.train.checkpoints.checkpoint_drafts import MANIFEST
from tpshard.train.checkpoints.restore import Damaged, SavedCheckpoint, newest, open_checkpoint, steps
from tpshard.train.checkpoints.store_path import Location
from tpshard.train.run.training_engine import InitialBlock, ReadBlock


def begun_from(recipe: Recipe, checkpoints: Location, context: Context) -> str | None:
    """The absolute place that a run begins from, of a run its checkpoint; None for its model. Every rank calls it.

    Rank 0 chooses and says it: the other run may go on meanwhile. A run that goes on keeps what its `checkpoints` say,
    because those of adapters lack the base.
    """
    if recipe.train.init_from is None:
        return None
    place = None
    if context.is_main:
        named = os.path.abspath(recipe.train.init_from)
        if (place := _begun_before(named, checkpoints)) is None:
            place = named
            with contextlib.suppress(ValueError):  # a folder, or what is refused where values are read
                place = str(newest_in(Path(named)).folder)
                print(f"the run begins from {place}", file=sys.stderr, flush=True)
    place = context.from_main(place)
    return None if place is None else str(place)


def _begun_before(named: str, checkpoints: Location) -> str | None:
    """The place that the newest readable checkpoint of a run began from, if it is one of what the recipe names."""
    for path in reversed(steps(checkpoints).values()):
        with contextlib.suppress(Damaged):
            begun = SavedCheckpoint(path).meta.get("init_from")
            return begun if begun is not None and Path(named) in (Path(begun), Path(begun).parent.parent) else None
    return None


def initial_values(recipe: Recipe, spec: ModelSpec, place: str | None) -> InitialBlock:
    """The reader of initial values, whose errors are mistakes of the recipe; the model's weights are opened at once.
    place: what `train.init_from` names, of `begun_from`.

    A run that goes on needs no weights of the folder that it began from, which may be gone, unless its checkpoints
    leave them out.
    """
    gone = carried_instead(recipe) is not None
    named = recipe.model

    @cache
    def others() -> Mapping[str, ReadBlock]:
        return {} if place is None else begin(recipe, place, spec)

    def block(
        name: str, starts: Sequence[int], sizes: Sequence[int], *, seed: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if name in others():
            try:
                value = others()[name](name, starts, sizes)
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
        where=recipe.where("train.init_from"), why=str(error),
        fix=getattr(error, "fix", "a run, a checkpoint or a folder of the same model"),
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
    other = open_alike(place, base)
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
        if own is None or other is None or _form(own) != _form(other):
            shown = [None if one is None else _shown(one) for one in (other, own)]
            message = f"`{path}` has {shown[0] or 'no adapter'} there and {shown[1] or 'none'} here"
            raise FolderError(message, _as_there(theirs))
    if set(theirs.spec.saved) != set(spec.saved):
        message = "`modules_to_save` are others there than here"
        raise FolderError(message, _as_there(theirs))
    return dict.fromkeys(theirs.places, theirs.block)


def _form(one: Adapter) -> tuple[int, float, bool, str]:
    """What of an adapter must be the same for its values to mean the same."""
    return one.rank, round(one.scaling, 9), one.dora, one.shared


def _shown(one: Adapter) -> str:
    more = ", dora" * one.dora + f", the lora_A of {one.shared}" * bool(one.shared)
    return f"rank {one.rank}, scaling {one.scaling:g}{more}"


def _as_there(theirs: PeftFolder) -> str:
    """The fix of adapters that are not those of a folder: what a recipe says to have them, if it can."""
    spec, lora = theirs.spec, theirs.spec.lora
    assert lora is not None
    with contextlib.suppress(ValueError):
        raw = config_of(lora, [*spec.adapters.values()], spec.adaptable(), (), "")
        named = {key: {name.removesuffix(".weight"): value for name, value in raw[key].items()}
                 for key in ("rank_pattern", "alpha_pattern")}  # fmt: skip
        targets = (*raw["target_modules"], *(raw["target_parameters"] or ()))
        own = Lora(
            lora.rank, lora.alpha, tuple(dict.fromkeys(name.removesuffix(".weight") for name in targets)), lora.dropout,
            lora.dora, lora.use_rslora, named["rank_pattern"], named["alpha_pattern"], lora.modules_to_save,
        )  # fmt: skip
        here = AdaptedModel(spec.base, own)
        forms = [{path: _form(one) for path, one in each.adapters.items()} for each in (here, spec)]
        if forms[0] == forms[1] and set(here.saved) == set(spec.saved):
            return f"adapters.lora as there: {_flow({key: v for key, v in asdict(own).items() if v})}"
    return "`tpshard convert FOLDER OUT --merge` writes the whole model, from which a run can begin"


def _flow(value: object) -> str:
    """A value as a recipe has it in a line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_flow(one)}' for key, one in value.items())}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _of_checkpoint(place: Path, spec: ModelSpec) -> dict[str, ReadBlock]:
    checkpoint = open_checkpoint(place) if (place / MANIFEST).is_file() else newest_in(place)
    saved = {name: one.shape for name, one in checkpoint.tensors.items() if not name.startswith(OPTIMIZER)}
    adapted = "adapters" in checkpoint.meta.get("model", {})
    if adapted and not (isinstance(spec, AdaptedModel) and spec.lora is not None):
        raise ValueError("it is a run with adapters, and the recipe has none: `tpshard convert --merge` first")
    optional = {*spec.left_out, *spec.added} if adapted else set(spec.added)
    shapes = {name: shape for name, shape in spec.shapes.items() if name in saved or name not in optional}
    vocab = from_json(checkpoint.meta["model"]).vocab if "model" in checkpoint.meta else None
    return dict.fromkeys(saved, widened(checkpoint.block, saved, shapes, (vocab, spec.vocab)))


def newest_in(run: Path) -> SavedCheckpoint:
    """The newest undamaged checkpoint of a run. ValueError where there is none."""
    checkpoint = newest(run / "checkpoints")
    if checkpoint is None:
        raise ValueError(f"there is no checkpoint in {run / 'checkpoints'}")
    return checkpoint
