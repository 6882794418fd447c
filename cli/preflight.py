"""What can be told about a recipe before anything is built: its own laws, and whether model and mesh fit.

Reads the presets, or a folder's config.json; imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpshard.recipes import load as recipes
from tpshard.recipes.diagnostic import Diagnostic, Exit, Mistakes
from tpshard.recipes.fit import misfits
from tpshard.recipes.schema import DEVICES

if TYPE_CHECKING:
    from tpshard.models.config import ModelConfig
    from tpshard.recipes.schema import Recipe


def checked(path: str, overrides: Sequence[str] = ()) -> tuple[Recipe, list[Diagnostic]]:
    """The recipe and its warnings. Raises `Mistakes` with everything that is wrong."""
    examined = recipes.examine(path, overrides)
    found = list(examined.diagnostics)
    if examined.sound("cluster", "mesh", "model", "sharding", "batch", "fsdp.wrap", "fsdp.bucket", "fsdp.axis"):
        found = recipes.in_order([*found, *beyond(examined.recipe)])
    if examined.sound("cluster.device"):
        found = recipes.in_order([*found, *device_file(examined.recipe)])
    if any(d.severity == "error" for d in found):
        raise Mistakes(found)
    return examined.recipe, found


def device_file(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """What is wrong with the device file that the recipe names; a shipped one is right."""
    if recipe.cluster is None or recipe.cluster.stored()["device"] in DEVICES:
        return ()
    from tpshard.devices.read import device

    try:
        device(recipe.cluster.device, recipe.where("cluster.device"))
    except Mistakes as mistakes:
        return mistakes.diagnostics
    return ()


def beyond(recipe: Recipe) -> list[Diagnostic]:
    """What is wrong with a sound recipe once its model is known."""
    try:
        config = configuration(recipe)
    except Mistakes as mistakes:
        return [*mistakes.diagnostics, *misfits(recipe, None)]
    found = misfits(recipe, config)
    return [*found, *_tokens(recipe, config)] if config is not None else found


def configuration(recipe: Recipe) -> ModelConfig | None:
    """The numbers of the recipe's model; None for a module of the user's own, and for a folder that is not here.

    Raises `Mistakes` (exit 3) when the numbers contradict each other.
    """
    from tpshard.models import presets

    model = recipe.model
    key = "preset"
    try:
        if model.preset is not None:
            return presets.preset(model.preset, model.overrides())
        key = "hf"
        if model.stored()["hf"] is not None and (Path(model.hf or "") / "config.json").is_file():
            from tpshard.models.hf_config import computes, folder_config

            folder = model.hf or ""
            return presets.override(folder_config(folder), model.overrides()) if computes(folder) else None
    except Mistakes:
        return None  # the environment does not say where the folder is, and nothing here needs to know
    except (ValueError, OSError) as error:
        given = [name for name in getattr(error, "names", ()) if name in model.overrides()]
        where = recipe.where(f"model.{given[0] if given else key}")
        raise Mistakes.one(f"`model`: {error}", where=where) from None
    return None


def _tokens(recipe: Recipe, config: ModelConfig) -> list[Diagnostic]:
    """The vocabulary holds every token that the tokenizer makes."""
    count = _tokenizer_size(recipe)
    if count is None or count <= config.vocab:
        return []
    where = next((s for k in ("model.vocab", "data.tokenizer", "model") if (s := recipe.where(k)).line), None)
    return [
        Diagnostic(
            f"the tokenizer has {count:,} tokens, and the model's vocabulary {config.vocab:,}",
            exit=Exit.RECIPE,
            where=where,
            why=f"{count - config.vocab:,} tokens without a row",
            fix=f"model.vocab: {-(-count // 128) * 128}",
        )
    ]


def _tokenizer_size(recipe: Recipe) -> int | None:
    """Tokens of the recipe's tokenizer, where that can be told without loading it."""
    written = recipe.data.stored()["tokenizer"]
    if written is None:
        if recipe.data.stored()["source"] != "sample":
            return None
        from tpshard.train.sample import VOCAB

        return VOCAB
    try:
        raw: Any = json.loads((Path(recipe.data.tokenizer or "") / "tokenizer.json").read_bytes())
        ids = [*raw["model"]["vocab"].values(), *(token["id"] for token in raw.get("added_tokens", ()))]
        return max(ids) + 1
    except (Mistakes, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # whoever reads the text tells what is wrong with it
