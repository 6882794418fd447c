"""The search leaves out what cannot fit without building it, and only that."""

from __future__ import annotations

import pytest
from tpshard.plan import planner
from tpshard.plan.search import search, search_bounds, search_result
from tpshard.plan.search.search_bounds import Bounds, least_seconds
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.variants import Variants
from tpshard.recipes.reading.load import loads, with_changes

RECIPE = """
name: deep
cluster: {device: cpu, nodes: 4, devices_per_node: 1}
mesh: {fsdp: 4}
model: {preset: tiny, layers: 8, width: 16, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64, vocab: 64, seq_len: 64}
batch: {global_sequences: 32}
compile: eager
"""
CASES = [
    ("{fsdp: 4}", "null", "none", "eager"),
    ("{fsdp: 2, tp: 2}", "null", "full", "inductor"),
    ("{pp: 2, fsdp: 2}", "{schedule: 1f1b}", "none", "inductor"),
    ("{pp: 4, fsdp: 1}", "{schedule: gpipe}", "none", "eager"),
    ("{pp: 2, fsdp: 2}", "{schedule: interleaved_1f1b, rounds: 2}", "full", "eager"),
    ("{fsdp: 4}", "null", "{every: 2}", "eager"),
]


@pytest.mark.parametrize(("mesh", "pipeline", "remat", "compiled"), CASES)
def test_a_bound_is_below_the_price_and_not_far(monkeypatch, mesh, pipeline, remat, compiled) -> None:
    monkeypatch.setattr(search_bounds, "DEEP", 6)
    recipe = loads(RECIPE)
    variant = with_changes(recipe, [f"mesh={mesh}", f"pipeline={pipeline}", f"remat={remat}", f"compile={compiled}",
                               "batch.per_device=2"])  # fmt: skip
    priced = search.price_variant(variant, variants=Variants()).needed_bytes
    least = Bounds(recipe).needed(variant, dict(Setting.of(variant).mesh.axes))
    assert least <= priced
    if remat == "none":
        assert least > 0.4 * priced


@pytest.mark.parametrize(
    ("changes", "remat"),
    [
        (["fsdp.prefetch=0"], "none"), (["fsdp.bucket=greedy"], "none"), (["fsdp.bucket=none"], "full"),
        (["fsdp.reshard_after_forward=false"], "selective"), (["fsdp.accumulate.gather=step"], "none"),
        (["mesh.dp=2", "mesh.fsdp=2"], "full"), (["mesh.dp=4", "mesh.fsdp=1", "fsdp.prefetch=4"], "none"),
    ],
)  # fmt: skip
def test_a_step_is_never_faster_than_the_bound_of_its_time(changes: list[str], remat: str) -> None:
    recipe = loads(RECIPE, [f"remat={remat}", "cluster={device: h100-sxm-80g, nodes: 1, devices_per_node: 4}",
                            "compile=inductor", "batch.per_device=4"])  # fmt: skip
    pricing, variant = planner.planned(recipe, "").pricing, with_changes(recipe, changes)
    priced, least_s = search.price_variant(variant, variants=Variants()), least_seconds(pricing, changes)
    assert 0.5 * pricing.compute_s < least_s <= priced.step_s
    assert least_seconds(pricing, [*changes, "remat=none"]) == 0.0
    mesh = dict(Setting.of(variant).mesh.axes)
    assert Bounds(recipe).needed(variant, mesh) <= priced.needed_bytes


def test_parameters_that_stay_gathered_count() -> None:
    recipe = loads(RECIPE, ["model.width=1024", "model.mlp=4096"])
    kept = with_changes(recipe, ["fsdp.reshard_after_forward=false"])
    size = sum(p.numel() for name, p in Setting.of(recipe).model.named_parameters() if name.startswith("layers."))
    least, priced = Bounds(recipe).needed(kept, {"fsdp": 4}), search.price_variant(kept, variants=Variants())
    assert least - Bounds(recipe).needed(recipe, {"fsdp": 4}) == 4 * size and least <= priced.needed_bytes


def test_a_pipelines_price_builds_its_first_last_and_one_middle_stage() -> None:
    bounds, recipe = Bounds(loads(RECIPE)), loads(RECIPE)
    assert bounds.layers_built(recipe) == 8
    staged = with_changes(recipe, ["mesh={pp: 4, fsdp: 1}", "pipeline={schedule: 1f1b}", "batch.per_device=1"])
    assert bounds.layers_built(staged) == 6
    assert bounds.layers_built(with_changes(staged, ["model.layers=1"])) == 0, "pricing refuses it"


def test_what_cannot_fit_is_not_built_and_what_is_too_much_is_listed(monkeypatch) -> None:
    monkeypatch.setattr(search_bounds, "DEEP", 6)
    monkeypatch.setattr(search_bounds, "MOST_LAYERS", 22)
    built: list[tuple[int, str]] = []

    def price(recipe, **_):
        built.append((recipe.mesh.get("pp", 1), recipe.remat))
        return search_result.VariantPrice(1, 1.0, 0.0, True)

    monkeypatch.setattr(search, "price_variant", price)
    monkeypatch.setattr(Bounds, "needed", lambda self, variant, mesh: 1 << 60 if variant.remat == "none" else 0)
    notes: list[str] = []
    result = search.search(loads(RECIPE), notes.append)
    built.pop()  # the recipe as written, priced at the end
    assert built and all(remat == "selective" for _, remat in built)
    assert sum({1: 8, 2: 8, 4: 6}[stages] for stages, _ in built) <= 22
    assert result.untried and any("not built" in note for note in notes)
    stages = [pp for pp, _ in built if pp > 1]
    assert stages == sorted(stages, reverse=True)
    assert "(a search builds 22 layers at most, " in search_result.text(result, loads(RECIPE))


def test_fewer_stages_are_left_out_once_they_are_slower(monkeypatch) -> None:
    built: list[int] = []

    def price(recipe, **_):
        stages = recipe.mesh.get("pp", 1)
        built.append(stages)
        return search_result.VariantPrice(1, {1: 1.0, 2: 4.0, 4: 3.0, 8: 2.0}[stages], 0.0, True)

    monkeypatch.setattr(search, "price_variant", price)
    recipe = loads(RECIPE, ["cluster.nodes=8", "mesh.fsdp=8"])
    result = search.search(recipe)
    assert 8 in built and 4 in built and 2 not in built
    assert result.untried == ["pp 2 x fsdp 4"]
    assert "not tried: pp 2 x fsdp 4 (" in search_result.text(result, recipe)
