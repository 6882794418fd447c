"""The model that a recipe names, with a mistake at the recipe's line where it cannot be had."""

from __future__ import annotations

from tpshard.models.model_spec import ModelSpec
from tpshard.models.open_model import open_model
from tpshard.programs.fit.wrong_model import wrong_model
from tpshard.recipes.keys.schema import Recipe


def model_of(recipe: Recipe, *, weights: bool = True) -> ModelSpec:
    """The model of a recipe's `model` section (see `open_model`). Mistakes, exit 3, where it cannot be had."""
    try:
        return open_model(recipe.model, weights=weights)
    except (ValueError, OSError) as error:
        raise wrong_model(recipe, error) from error
