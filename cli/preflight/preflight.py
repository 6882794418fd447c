"""Checks of a recipe before anything is built: its own constraints, and whether model and mesh fit.

Reads presets or a folder's config.json; does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tpshard.cli.preflight.model_checks import adapter_errors, begin_errors, code_errors, model_errors, schedule_errors
from tpshard.cli.preflight.text_checks import text_errors, too_little
from tpshard.diagnostics.diagnostic import Diagnostic, Mistakes
from tpshard.recipes.keys.schema import DEVICES
from tpshard.recipes.keys.stores import is_url
from tpshard.recipes.reading import load as recipes

if TYPE_CHECKING:
    from tpshard.recipes.keys.schema import Recipe


FITTED = (
    "cluster", "mesh", "model", "sharding", "batch", "fsdp.wrap", "fsdp.bucket", "fsdp.axis", "adapters", "quantize",
    "train.freeze",
)  # fmt: skip
"""The keys whose values must be sound for a model to be opened and fitted."""


def load_checked(
    path: str, overrides: Sequence[str] = (), *, text: bool = False, weights: bool = True
) -> tuple[Recipe, list[Diagnostic]]:
    """Reads and checks a recipe; returns it with its warnings. text: whether to check its data and tokenizer too.
    weights: whether models that it names on the hub are fetched with their weights.

    Raises `Mistakes` with all its errors.
    """
    store = path if is_url(path) else None
    examined = recipes.examine(on_this_host(path), overrides, store=store, weights=weights)
    found = list(examined.diagnostics)
    if examined.sound(*FITTED):
        found += model_errors(examined.recipe)
    if examined.sound("cluster.device"):
        found += device_file(examined.recipe)
    if text and examined.sound("data", "task"):
        told = text_errors(examined.recipe)
        known = examined.sound("model", "batch") and not any(d.severity == "error" for d in [*found, *told])
        found += [*told, *(too_little(examined.recipe) if known else ())]
    if text and examined.sound("model", "task", "adapters", "quantize", "train.freeze"):
        found += code_errors(examined.recipe)
    if text and examined.sound("schedule", "optimizer.lr", "train"):
        found += schedule_errors(examined.recipe)
    if text and examined.sound(*FITTED, "train.init_from") and not any(d.severity == "error" for d in found):
        found += [*begin_errors(examined.recipe), *adapter_errors(examined.recipe)]
    diagnostics = recipes.in_order(found)
    if any(d.severity == "error" for d in diagnostics):
        raise Mistakes(diagnostics)
    return examined.recipe, diagnostics


def on_this_host(recipe: str) -> str:
    """The name of a recipe, where it is a run in an object store that of a folder with its small files. Raises
    `Mistakes` (exit 5, 7) where the store cannot be reached, or holds no run there."""
    if not is_url(recipe):
        return recipe
    from tpshard.train.checkpoints.store_path import StorePath
    from tpshard.train.run.run_store import fetched_run

    return str(fetched_run(StorePath(recipe)))


def device_file(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """The errors in the device file that the recipe names; shipped files have none."""
    if recipe.cluster is None or recipe.cluster.stored()["device"] in DEVICES:
        return ()
    from tpshard.devices.read import device

    try:
        device(recipe.cluster.device, recipe.where("cluster.device"))
    except Mistakes as mistakes:
        return mistakes.diagnostics
    return ()
