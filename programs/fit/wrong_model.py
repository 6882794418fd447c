"""The mistake that a recipe makes by naming a model that cannot be built."""

from __future__ import annotations

from typing import Any

from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes, Source, join, looked_for
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.text.other_tools import hub_fix

FIXES = {
    "hf": "name another folder, or correct this one",
    "transformers": "name another folder, or correct this one",
    "module": "correct the class or `model.args`",
    "preset": "change the model's dimensions",
}
"""Key that names the model -> the fix that is shown where no other key of the recipe caused the error."""


def _place(recipe: Recipe, key: str) -> Source:
    """The place of a key, or of the nearest one above it that is written."""
    above = key.rpartition(".")[0]
    return recipe.where(key) if recipe.where(key).line or "." not in above else _place(recipe, above)


def wrong_model(recipe: Recipe, error: Exception) -> Mistakes:
    """The mistake for `error`, at the dimension that the recipe changes and the error names, or else at the model; for
    one of what is trained with those in its `also`."""
    if getattr(error, "key", ""):
        own: Any = error
        each = (own, *getattr(own, "also", ()))
        return Mistakes(Diagnostic(str(e), Exit.RECIPE, _place(recipe, e.key), e.why, e.fix) for e in each)
    model, names = recipe.model.stored(), getattr(error, "names", ())
    changed = [f"model.{name}" for name in names if model.get(name) is not None]
    key = recipe.model.named_by
    assert key is not None, "a model was named"
    where = recipe.where(changed[0] if changed else f"model.{key}")
    default = FIXES.get(key, f"correct `model.{key}`")
    fix = f"change {join(f'model.{name}' for name in names)}" if changed else getattr(error, "fix", default)
    if key in recipe.model.paths:
        fix = hub_fix(str(model[key])) or fix
    message = f"{error}" if key == "module" else f"`model`: {error}"
    why = looked_for(str(model[key]), where) if key in recipe.model.paths else ""
    return Mistakes.one(message, exit=Exit.RECIPE, where=where, why=why, fix=fix)
