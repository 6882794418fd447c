"""Each suggestion is planned as a whole; if none helps, the plan says what was tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from small_recipe import RECIPE
from tpshard.plan import planner
from tpshard.plan.report.planned import Planned
from tpshard.plan.report.report import Report
from tpshard.plan.search import search, suggest
from tpshard.plan.search.search_bounds import Bounds
from tpshard.plan.search.search_result import VariantPrice
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import loads, with_changes


def changes(edit: Any) -> list[str]:
    return [part.replace(": ", "=", 1) for part in edit.change.split(", ")]


def test_suggestions_are_planned_whole_and_the_fastest_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggest, "MOST", 8)
    recipe = loads(RECIPE, ["remat=full"])
    report = planner.report(recipe, "")
    suggestions = suggest.suggest(report, recipe)
    assert suggestions.planned == 8 and suggestions.edits
    times = [edit.step_s for edit in suggestions.edits]
    assert times == sorted(times) and times[-1] < 0.98 * report.pricing.step_s
    best = planner.report(with_changes(recipe, changes(suggestions.edits[0])), "").pricing
    assert (best.step_s, best.needed_bytes) == (suggestions.edits[0].step_s, suggestions.edits[0].needed_bytes)


@pytest.mark.parametrize(
    ("of", "wire", "changed"),
    [("parameter", "across", "fsdp.accumulate.gather"), ("activation", "inside", "mesh.fsdp")],
)
def test_what_waits_longest_is_what_a_plan_tries_to_change_first(report, of: str, wire: str, changed: str) -> None:
    line = replace(report.lines[0], of=of, wire=wire, exposed_s=0.5 * report.pricing.step_s)
    job = replace(report.job, micro_batches=4)
    likely = suggest._Search(replace(report, job=job, lines=[line]), loads(RECIPE), print).likely_changes()
    assert likely[0][0].partition("=")[0] == changed
    assert suggest._Search(replace(report, lines=[]), loads(RECIPE, ["remat=none"]), print).likely_changes() == []


def steps(report: Report, gains: Mapping[str, float], unfit: tuple[str, ...] = ()) -> Any:
    """The price of a variant, from the gain of each changed key."""
    base, plain = report.pricing.step_s, loads(RECIPE)

    def quick(recipe: Recipe, what: str, variants: object) -> VariantPrice:
        values = {"remat": recipe.remat, "fsdp.prefetch": recipe.fsdp.prefetch, "tp": recipe.mesh["tp"]}
        before = {"remat": plain.remat, "fsdp.prefetch": plain.fsdp.prefetch, "tp": plain.mesh["tp"]}
        moved = [key for key in values if values[key] != before[key]]
        step = base
        for key in moved:
            step *= gains.get(key, 1.0)
        return VariantPrice(1, step, 0.0, not any(key in unfit for key in moved))

    return quick


def test_changes_that_help_are_combined_and_those_that_do_not_fit_left_out(report, monkeypatch) -> None:
    monkeypatch.setattr(
        search, "price_variant", steps(report, {"remat": 0.9, "fsdp.prefetch": 0.8, "tp": 0.5}, ("tp",))
    )
    suggestions = suggest.suggest(report, loads(RECIPE))
    assert {change.partition("=")[0] for change in changes(suggestions.edits[0])} == {"remat", "fsdp.prefetch"}
    assert suggestions.unfit and not any("mesh.tp" in edit.change for edit in suggestions.edits)


def test_where_nothing_helps_the_search_says_what_it_tried(report, monkeypatch) -> None:
    monkeypatch.setattr(search, "price_variant", steps(report, {}))
    suggestions = suggest.suggest(report, loads(RECIPE))
    assert suggestions.edits == [] and suggestions.planned > 10
    assert (
        suggestions.words.startswith(f"{suggestions.planned} variants planned whole")
        and "nothing helps" in suggestions.words
    )


def test_what_the_bounds_rule_out_is_not_planned(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, tried = loads(RECIPE), list[tuple[str, ...]]()
    monkeypatch.setattr(suggest, "least_seconds", lambda pricing, changes: 1e9 * (changes[0][:13] == "fsdp.prefetch"))
    monkeypatch.setattr(Bounds, "needed", lambda self, variant, mesh: (1 << 60) * (variant.remat == "none"))

    def price(recipe: Recipe, change: tuple[str, ...], variants: object) -> VariantPrice:
        tried.append(tuple(change))
        return VariantPrice(1, planned.report.pricing.step_s * 0.9 ** len(change), 0.0, True)

    monkeypatch.setattr(suggest, "price_changes", price)
    result = suggest.suggest(planned.report, recipe, pricing=planned.pricing)
    assert (result.bounded, result.unstorable) == (3, 1) and "3 not planned, as they cannot gain 2%" in result.words
    assert not any("remat=none" in change for change in tried)
    assert ("fsdp.prefetch=0",) not in tried and any("fsdp.prefetch=0" in change for change in tried)


def test_sequence_parallelism_is_put_in_and_taken_out(report) -> None:
    plain = loads(RECIPE)

    def changed(of: Report, recipe: Recipe) -> Recipe:
        actual = suggest._Search(of, recipe, print).free()
        (change,) = [c for c in actual if c[0].startswith("sharding.")]
        return with_changes(recipe, change)

    cut = changed(report, plain)
    with_it = planner.report(cut, "")
    without = planner.report(changed(with_it, cut), "")
    assert without.fingerprint == report.fingerprint != with_it.fingerprint
