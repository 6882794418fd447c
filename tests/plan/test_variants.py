"""What an edit, a suggestion or a search says of a variant is what its own plan says."""

from __future__ import annotations

import pytest
from small_recipe import RECIPE
from tpshard.plan.search.search import price_variant
from tpshard.programs.step import few_layers
from tpshard.programs.step.variants import Variants
from tpshard.recipes.reading.load import loads, with_changes

from plan_variants import figures, outcomes, plan_whole


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
    recipe = with_changes(loads(RECIPE, overrides), changes)
    assert recipe.to_yaml() == loads(RECIPE, [*overrides, *changes]).to_yaml()
    again = with_changes(recipe, ["remat=full"])
    assert again.to_yaml() == loads(RECIPE, [*overrides, *changes, "remat=full"]).to_yaml()


def test_schedules_share_equal_stages_and_devices_and_cost_what_their_plans_say(monkeypatch):
    """Schedules of one mesh have stages and devices in common; each still has the price of its own plan."""
    built = {"device_programs": 0, "finished_stages": 0}
    pricing = []
    for name in built:
        real = getattr(few_layers, name)

        def counted(*args, name=name, real=real):
            built[name] += len(pricing)
            return real(*args)

        monkeypatch.setattr(few_layers, name, counted)
    sizes = ["model.layers=8", "mesh={pp: 2, fsdp: 2, tp: 1}", "batch={global_sequences: 16, per_device: 1}"]
    recipe, variants = loads(RECIPE, [*sizes, "pipeline={schedule: gpipe}"]), Variants()
    changes = {
        "1f1b": ["pipeline={schedule: 1f1b, split: [4, 4]}"],
        "gpipe": ["pipeline={schedule: gpipe, split: [4, 4]}"],
        "zero_bubble": ["pipeline={schedule: zero_bubble, split: [4, 4]}"],
        "rounds": ["pipeline={schedule: interleaved_1f1b, rounds: 2, split: [2, 2, 2, 2]}"],
        "remat": ["pipeline={schedule: 1f1b, split: [4, 4]}", "remat=full"],
    }
    for name, change in changes.items():
        changed = with_changes(recipe, change)
        pricing.append(name)
        price = price_variant(changed, variants=variants)
        pricing.clear()
        plan = figures(plan_whole(changed, as_plan=True))
        assert plan == {"memory": price.needed_bytes, "step": price.step_s, "exposed": price.exposed_s,
                        "comm": price.comm_s}, name  # fmt: skip
    assert built == {"device_programs": 2, "finished_stages": 4}, "gpipe's stages are 1f1b's; all have its devices"
