"""Reads SOURCE arguments: a recipe (its latest checkpoint), a checkpoint, or a Hugging Face folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tpshard.cli.shared.source_model import SourceModel, unreadable_source
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.files.hub_folder import folder_of
from tpshard.recipes.keys.data_keys import TokenizerTraining
from tpshard.recipes.keys.stores import is_url

if TYPE_CHECKING:
    import torch
    from tpshard.models.model_spec import ModelSpec
    from tpshard.recipes.keys.schema import Recipe
    from tpshard.train.checkpoints.restore import SavedCheckpoint
    from tpshard.train.checkpoints.store_path import Location
    from tpshard.train.checkpoints.verify import Together


MANIFEST, ADAPTERS = "manifest.json", "adapter_config.json"


def open_source(
    source: str, overrides: Sequence[str] = (), *, modules: bool = False, trusted: Recipe | None = None
) -> SourceModel:
    """The model that SOURCE names. `modules` also accepts users' modules, which are imported only where `trusted`, the
    recipe of the command, or else the recipe of the checkpoint's run names them.

    Raises `Mistakes`: exit 2 or 3 where SOURCE names nothing or a wrong recipe, 4 for a user's module, 7 where the
    checkpoint cannot be read.
    """
    path = opened_location(source)
    if holds_model(path):
        if overrides:
            message = f"`{overrides[0]}` changes a recipe, but {source} is not one"
            raise Mistakes.one(message, exit=Exit.USAGE, fix="leave it out")
        if isinstance(path, Path) and not (path / MANIFEST).is_file():
            return _from_folder(path, trusted.model.module if modules and trusted is not None else None)
        return _from_checkpoint(path, None, modules, trusted)
    from tpshard.cli.shared.arguments import load
    from tpshard.models.folders.foreign_formats import refuse_format

    try:
        if isinstance(path, Path):
            refuse_format(path)
    except (ValueError, OSError) as error:
        raise unreadable_source(path, error) from error
    recipe = load(source, overrides, trained=True)
    model = _from_checkpoint(latest(runs_of(source, recipe), recipe).folder, recipe, modules)
    return named_tokenizer(model, recipe, overrides)


def named_tokenizer(model: SourceModel, recipe: Recipe, overrides: Sequence[str]) -> SourceModel:
    """The model with the tokenizer that the command line names, if it names one."""
    from tpshard.cli.shared.arguments import names_tokenizer

    if not names_tokenizer(overrides):
        return model
    if isinstance(recipe.data.tokenizer, TokenizerTraining):
        raise Mistakes.one(
            "only `train` trains a tokenizer", exit=Exit.USAGE, where=recipe.where("data.tokenizer.train"),
            fix="leave it out: the model has its own; or name a folder",
        )  # fmt: skip
    return replace(model, tokenizer=_tokenizer(recipe))


def opened_location(source: str) -> Location:
    """The place that SOURCE names. Raises `Mistakes`: exit 2, 5 where it is in a store that cannot be reached, 7 for a
    checkpoint without its manifest, whose recipe would lead to the run's newest one."""
    from tpshard.train.checkpoints.store_path import StorePath, location, require_store

    place = location(folder_of(source))
    if isinstance(place, StorePath):
        require_store(place)
    elif any(place.glob("rank-*.safetensors")) and not (place / MANIFEST).is_file():
        raise Mistakes.one(
            f"{place} is no whole checkpoint: it has no {MANIFEST}",
            exit=Exit.CHECKPOINT,
            fix="one being written gets its manifest last: wait for it, or name another step of its run",
        )
    return place


def runs_of(source: str, recipe: Recipe) -> Location:
    """The place of a recipe's checkpoints: below SOURCE if that is a run's, else below the recipe's run.dir."""
    from tpshard.train.checkpoints.store_path import location

    if is_url(source) or (Path(source) / "checkpoints").is_dir():
        return location(source) / "checkpoints"
    return (recipe.run.folder if recipe.run.store is None else opened_location(recipe.run.store)) / "checkpoints"


def run_files(checkpoint: Location) -> Path:
    """The folder with the small files of the run that wrote a checkpoint: that run's, or a copy of those in a store, or
    of a checkpoint that was copied out of its run the checkpoint's own."""
    from tpshard.train.run.run_store import fetched_run

    if isinstance(checkpoint, Path):
        own, run = checkpoint.absolute(), checkpoint.absolute().parent.parent
        alone = own.parent.name != "checkpoints" or not (run / "recipe.yaml").is_file()
        return own if alone and (own / "recipe.yaml").is_file() else run
    return fetched_run(checkpoint.parent.parent, required=False)


def run_recipe(checkpoint: Location) -> Path:
    """The recipe of the run that wrote a checkpoint."""
    return run_files(checkpoint) / "recipe.yaml"


def holds_model(folder: Location) -> bool:
    """Whether a place is a checkpoint, which gets its manifest last, or a Hugging Face folder of this machine."""
    if not isinstance(folder, Path):
        return (folder / MANIFEST).is_file()
    return any(os.path.lexists(folder / name) for name in ("config.json", ADAPTERS)) or (folder / MANIFEST).is_file()


def keep_apart(model: SourceModel, out: Path) -> None:
    """Raises `Mistakes` (exit 2) where writing to `out` would replace a folder that holds the model."""
    if out.resolve() in Path(model.name).resolve().parents:
        raise Mistakes.one(
            f"{out} contains the model that is read, {model.name}", exit=Exit.USAGE, fix="choose another name"
        )


def model_place(named: str, recipe: Recipe, key: str) -> Location | None:
    """The place with a model that a recipe's `key` names: a checkpoint, a Hugging Face folder, or of a run its newest
    checkpoint; None where it is neither. Raises `Mistakes` as `opened_location` and `latest` do."""
    from tpshard.train.checkpoints.checkpoint import steps

    place = opened_location(named)
    if holds_model(place):
        return place
    return latest(place / "checkpoints", recipe, key).folder if steps(place / "checkpoints") else None


def latest(
    checkpoints: Location, recipe: Recipe, key: str = "run.dir", ranks: Together | None = None
) -> SavedCheckpoint:
    """The newest undamaged checkpoint, which stderr names. ranks: those of which each calls this. Raises `Mistakes`
    (exit 7) where there is none, at the recipe's `key`."""
    from tpshard.train.checkpoints.restore import newest
    from tpshard.train.checkpoints.verify import ALONE

    ranks = ranks or ALONE
    checkpoint = newest(checkpoints, ranks)
    if checkpoint is None:
        raise Mistakes.one(
            f"there is no checkpoint in {checkpoints}",
            exit=Exit.CHECKPOINT,
            where=recipe.where(key),
            fix="`tpshard train` writes them; or name a checkpoint's folder",
        )
    if ranks.rank == 0:
        print(f"reading {checkpoint.folder}", file=sys.stderr, flush=True)
    return checkpoint


def _from_folder(folder: Path, module: str | None) -> SourceModel:
    from tpshard.models.folders.hf_folder import DTYPES
    from tpshard.models.folders.hf_json import TOKENIZER
    from tpshard.models.open_model import open_model

    if (folder / ADAPTERS).is_file():
        from tpshard.cli.shared.adapted_sources import peft_source

        return peft_source(folder)
    name, tokenizer = str(folder), folder if any((folder / file).exists() for file in TOKENIZER) else None
    try:
        spec = open_model(folder, module=module)
        if (weights := spec.weights) is None:
            raise ValueError(f"{folder} holds no weights")
    except (ValueError, OSError) as error:
        raise unreadable_source(folder, error) from error
    return SourceModel(name, spec, weights.block, DTYPES[spec.dtype], tokenizer, folder, weights.quantized)


def _from_checkpoint(
    folder: Location, recipe: Recipe | None, modules: bool, trusted: Recipe | None = None
) -> SourceModel:
    from tpshard.models.adapters.adapted_model import AdaptedModel
    from tpshard.models.folders.folder_files import carried
    from tpshard.models.folders.folder_tokenizer import tokenizer_files
    from tpshard.models.open_model import from_json
    from tpshard.train.checkpoints.restore import open_checkpoint

    checkpoint = open_checkpoint(folder)
    recipe = recipe or _recipe_of_run(folder)
    try:
        spec = from_json(checkpoint.meta["model"]) if "model" in checkpoint.meta else _spec_of(recipe)
    except (ValueError, OSError) as error:
        message, fix = f"{folder} does not describe its model", "copy the recipe.yaml of its run two folders up"
        raise Mistakes.one(message, exit=Exit.CHECKPOINT, why=str(error), fix=fix) from error
    if spec.reads_code and not modules:
        raise Mistakes.one(
            f"{folder} holds a module of your own, {spec.source.name}",
            exit=Exit.FIT,
            why="only the models of tpshard and of transformers can be written as Hugging Face folders",
            fix="`tpshard serve` reads the checkpoint",
        )
    recipes = [known for known in (trusted, recipe) if known is not None]
    if spec.reads_code and all(known.model.module != spec.source.name for known in recipes):
        raise Mistakes.one(
            f"{folder} names the module {spec.source.name}, which no recipe names",
            exit=Exit.CHECKPOINT,
            why="a module is code: it is imported for a recipe, never for a checkpoint",
            fix=f"name the recipe of its run, or one with model.module: {spec.source.name}",
        )
    try:
        dtype = _require(checkpoint, spec)
    except ValueError as error:  # the module cannot be imported
        raise unreadable_source(folder, error) from error
    kept = carried(run_files(folder))
    tokenizer = kept if tokenizer_files(kept) else _tokenizer(recipe)
    base = kept if (kept / "config.json").is_file() else None
    model = SourceModel(str(folder), spec, checkpoint.block, dtype, tokenizer, base)
    if not isinstance(spec, AdaptedModel) or spec.lora is None:
        return model
    from tpshard.cli.shared.adapted_sources import whole_blocks, with_adapters

    try:
        return with_adapters(model, spec, whole_blocks(spec, checkpoint))
    except (ValueError, OSError) as error:
        raise unreadable_source(folder, error) from error


def _spec_of(recipe: Recipe | None) -> ModelSpec:
    from tpshard.models.open_model import open_model

    if recipe is None:
        raise ValueError("its manifest names no model, and there is no recipe.yaml two folders up")
    return open_model(recipe.model)


def _recipe_of_run(checkpoint: Location) -> Recipe | None:
    from tpshard.recipes.reading.load import load

    file = run_recipe(checkpoint)
    return load(file) if file.is_file() else None


def _require(checkpoint: SavedCheckpoint, spec: ModelSpec) -> torch.dtype:
    """Checks that the checkpoint is of this model, and returns the dtype of its values. Raises `Mistakes` otherwise."""
    import torch
    from tpshard.train.checkpoints.checkpoint import OPTIMIZER

    saved = {name: (tensor.shape, tensor.dtype) for name, tensor in checkpoint.tensors.items()}
    state = {name: shape_and_dtype for name, shape_and_dtype in saved.items() if name.startswith(OPTIMIZER)}
    dtype = next((shape_and_dtype[1] for name, shape_and_dtype in saved.items() if name not in state), torch.float32)
    stored = {name: shape for name, shape in spec.shapes.items() if name not in spec.left_out}
    checkpoint.require(state | {name: (shape, dtype) for name, shape in stored.items()})
    return dtype


def _tokenizer(recipe: Recipe | None) -> Path | None:
    """The folder of the recipe's tokenizer, if the recipe names one and it exists."""
    if recipe is None:
        return None
    try:
        folder = recipe.data.tokenizer
    except Mistakes:  # an environment variable is not set; the weights do not need it
        return None
    if folder == "bytes":
        from tpshard.train.data.made_tokenizer import byte_tokenizer

        return byte_tokenizer()
    if isinstance(folder, TokenizerTraining):  # the run that trained it keeps it
        return None
    if folder is not None:
        return Path(folder) if Path(folder).is_dir() else None
    if recipe.data.stored()["source"] == "sample":
        from tpshard.train.data.sample import ensure_sample

        return ensure_sample().tokenizer
    return None
