"""What an edit, a suggestion or a search says of a variant is what its own plan says."""

from __future__ import annotations

import pytest
from small_recipe import RECIPE
from tpshard.plan.search import variant
from tpshard.recipes.load import loads

from plan_variants import outcomes


@pytest.mark.parametrize("number", [0, 1, 2, pytest.param(range(3, 20), marks=pytest.mark.slow)])
def test_random_variants_cost_what_their_full_plans_say(number: int | range) -> None:
    for each in [number] if isinstance(number, int) else number:
        for outcome in outcomes(7, each, ["tiny"], layers=2, count=1 if isinstance(number, int) else 4):
            assert outcome.kind in ("equal", "refused") and outcome.largest == 0, (outcome.changes, outcome.words)


@pytest.mark.parametrize(
    "changes",
    [
        ["fsdp.master_dtype=bf16"],
        ["model.dtype=bf16"],
        ["mesh={pp: 2, tp: 1}", "pipeline={schedule: gpipe, form: vectorized}"],
        ["mesh={fsdp: 1, ep: 2}", "model.preset=tiny-moe"],
    ],
)
def test_a_variant_is_the_recipe_that_its_changes_load(changes: list[str]) -> None:
    """Defaults that depend on a changed key follow it: the moments' dtype, the axes of the vocabulary."""
    overrides = ["train.steps=40"]
    recipe = variant(loads(RECIPE, overrides), changes)
    assert recipe.to_yaml() == loads(RECIPE, [*overrides, *changes]).to_yaml()
    again = variant(recipe, ["remat=full"])
    assert again.to_yaml() == loads(RECIPE, [*overrides, *changes, "remat=full"]).to_yaml()
