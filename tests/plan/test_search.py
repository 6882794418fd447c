"""Edits that make a recipe fit, suggestions, and the search over meshes."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from patience import PATIENCE
from small_recipe import RECIPE, tight_device
from tpshard.cli.main import run as tpshard
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.plan import command, planner
from tpshard.plan.report.report import Edit
from tpshard.plan.search import search, search_pipelines, search_result, suggest
from tpshard.plan.search.edits import edits as edits_of
from tpshard.plan.step.units import gib
from tpshard.programs.parts import step_programs
from tpshard.programs.setting import cluster
from tpshard.recipes.keys.parallel_keys import RematEvery
from tpshard.recipes.reading.load import loads, with_changes


def test_too_little_memory_names_edits_that_fit(small, capsys):
    (small.parent / "tight.yaml").write_text(tight_device(1))
    code = tpshard(
        ["plan", "small.yaml", "--dry-run", "--json", "cluster.device=tight.yaml", "model.vocab=65536",
         "model.seq_len=512", "batch.per_device=4"]
    )  # fmt: skip
    out = json.loads(capsys.readouterr().out)
    assert code == Exit.FIT
    assert not out["fits"] and out["spare_bytes"] < 0
    assert out["edits"] and any(edit["fits"] for edit in out["edits"])
    assert max(out["memory"]["by_category"], key=out["memory"]["by_category"].get) == "logits_and_loss"


def test_a_server_that_does_not_fit_is_told_edits_that_fit_when_made(report, monkeypatch):
    def needed_bytes(*changes):
        return planner.report(loads(RECIPE, ["serve.mesh.tp=1", *changes]), "", "decode").pricing.needed_bytes

    full = needed_bytes()
    actual = planner.report(loads(RECIPE, ["serve.mesh.tp=1"]), "", "decode")
    limit = full - 1
    assert needed_bytes("serve.requests=8") < limit
    whole = cluster.device_of

    def tight(recipe):
        device, nodes, per_host = whole(recipe)
        processes = recipe.serve.mesh["tp"]  # a CPU's share the host's memory
        return replace(device, memory_bytes=limit * processes), nodes, per_host

    monkeypatch.setattr(cluster, "device_of", tight)
    edits = edits_of(actual, loads(RECIPE, ["serve.mesh.tp=1"]))
    assert len(edits) == 3 and all(edit.fits for edit in edits)
    for edit in edits:
        assert needed_bytes(*(change.replace(": ", "=") for change in edit.change.split(", "))) == edit.needed_bytes


def test_an_edit_that_fits_is_not_offered_again_with_more_beside_it(report, monkeypatch):
    tried = []

    def quick(recipe, what, variants):
        tried.append((recipe.batch.per_device, recipe.remat))
        return search_result.VariantPrice(1, 1.0, 0.0, recipe.batch.per_device == 1 or recipe.remat == "full")

    monkeypatch.setattr(search, "price_variant", quick)
    edits = edits_of(report, loads(RECIPE, ["remat=none"]), count=2)
    assert [edit.change for edit in edits] == ["remat: full", "batch.per_device: 1"]


def test_an_edit_that_leaves_too_much_in_memory_is_not_planned(report, monkeypatch):
    tried = []

    def quick(recipe, what, variants):
        tried.append(recipe)
        return search_result.VariantPrice(1, 1.0, 0.0, False)

    monkeypatch.setattr(search, "price_variant", quick)
    pricing, kinds = report.pricing, ("parameters", "gradients", "optimizer")
    state = sum(pricing.worst.at_peak.get(kind, 0) for kind in kinds)

    def changed(memory: float) -> set[str]:
        """What is tried on a device with so much memory for a step."""
        tried.clear()
        device = replace(pricing.device, memory_bytes=int(memory + pricing.device.context_bytes))
        small = replace(report, pricing=replace(pricing, device=device))
        edits_of(small, own)
        return {str(recipe.remat) for recipe in tried if (recipe.fsdp, recipe.cluster) == (own.fsdp, own.cluster)}

    own = loads(RECIPE, ["remat=none"])
    assert {"full", "selective"} <= changed(1.1 * state)
    assert changed(0.9 * state) <= {"none"}, "recomputing leaves the state as it is"


def test_a_search_builds_no_mesh_that_cannot_store_the_state(monkeypatch):
    """Replicas of 7 billion parameters with their moments exceed every device; what all devices share is priced."""
    tried = []

    def quick(recipe, **_):
        tried.append((recipe.mesh["dp"], recipe.mesh["fsdp"]))
        return search_result.VariantPrice(1, 1.0, 0.0, True)

    monkeypatch.setattr(search, "price_variant", quick)
    text = "cluster: {device: a100-40g, nodes: 4, devices_per_node: 2}\nmodel: {preset: llama3-8b}\nmesh: {fsdp: 8}"
    notes: list[str] = []
    assert search.search(loads(text), notes.append).refused > 0
    assert (1, 8) in tried and all(dp == 1 for dp, _ in tried)
    assert any("alone exceed the memory" in note for note in notes)


def test_a_search_recomputes_as_few_layers_as_fit(monkeypatch):
    """Of 32 layers 19 are the fewest; each saves a gigabyte and costs time."""
    tried = []

    def quick(recipe, **_):
        layers = recipe.remat.first if isinstance(recipe.remat, RematEvery) else 32 if recipe.remat == "full" else 0
        tried.append(layers)
        limit = cluster.device_of(recipe)[0].memory_bytes
        needed = limit + int((18.5 - layers) * 2**30)
        return search_result.VariantPrice(needed, 1.0 + layers / 100, 0.0, needed <= limit)

    monkeypatch.setattr(search, "price_variant", quick)
    recipe = loads(RECIPE, ["model.layers=32"])
    result = search.search(recipe)
    assert result.candidates[0].remat == "{first: 19}"
    assert loads(search_result.winner(result, recipe)).remat == RematEvery(first=19)
    assert {n for n in tried if n not in (0, 32)} == {19}, "memory is a line here"


def test_a_search_says_why_no_pipeline_is_faster() -> None:
    def candidate(mesh: dict[str, int], step_s: float, idle_s: float, *more: str) -> search_result.Candidate:
        price = search_result.VariantPrice(1, step_s, 0.2, True, 0.3, idle_s)
        return search_result.Candidate(mesh, "none", 1, price, 1.0, more=more)

    def shown(*candidates: search_result.Candidate) -> str:
        result = search_result.SearchResult(search_result.mark_fastest(candidates))
        return search_result.text(result, loads(RECIPE))

    plain, slow = candidate({"fsdp": 4, "tp": 1}, 2.0, 0.0), candidate({"fsdp": 4, "tp": 1}, 3.0, 0.0)
    piped = candidate({"pp": 2, "fsdp": 2, "tp": 1}, 2.5, 0.5, "pipeline={schedule: 1f1b}")
    assert (
        "no pipeline is faster: with pp 2 x fsdp 2 a step takes 25.0% longer; a device waits 20% for other stages and "
        "8% of a step for collectives, without it 10% of a step for collectives"
    ) in shown(plain, piped)
    assert "no pipeline" not in shown(plain) + shown(piped) + shown(piped, slow)


def test_search_ranks_what_fits():
    recipe = loads(RECIPE, ["cluster.devices_per_node=2", "mesh.fsdp=2", "mesh.tp=1",
                            "batch.global_sequences=2", "batch.per_device=1"])  # fmt: skip
    variants = search.search(recipe)
    assert {(c.mesh["fsdp"], c.mesh["tp"]) for c in variants.candidates} == {(2, 1), (1, 2)}
    steps = [c.price.step_s for c in variants.candidates]
    assert steps == sorted(steps)
    assert variants.candidates[0].pareto
    shown = search_result.text(variants, recipe)
    winner = loads(shown.partition("# the fastest, as a recipe\n")[2])
    assert winner.mesh == {**winner.mesh, **variants.candidates[0].mesh}
    assert variants.as_written == search.price_variant(recipe)
    share = steps[0] / variants.as_written.step_s
    assert f"the recipe as written: {gib(variants.as_written.needed_bytes)}, " in shown
    assert f"; the fastest takes {share:.0%} of that time" in shown


@pytest.mark.parametrize(
    ("written", "more", "words"),
    [
        ([], [], []),
        ([], ["pipeline={schedule: 1f1b}"], ["1f1b"]),
        (["mesh={pp: 2, fsdp: 2, tp: 1}", "pipeline={schedule: zero_bubble}"], [], ["zero_bubble"]),
        (["mesh={pp: 2, fsdp: 2, tp: 1}", "pipeline={schedule: zero_bubble}"], ["pipeline=null"], []),
        (
            ["mesh={pp: 2, fsdp: 2, tp: 1}", "pipeline={schedule: 1f1b}"],
            ["pipeline.schedule=interleaved_1f1b", "pipeline.rounds=2", *search_pipelines.ONCE],
            ["interleaved_1f1b", "rounds 2", "fsdp.accumulate.gather step", "fsdp.accumulate.reduce last"],
        ),
    ],
)
def test_a_row_names_its_schedule_and_the_keys_it_changes(written, more, words):
    assert search_result.pipeline_words(more, loads(RECIPE, written)) == words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["batch={global_sequences: 4, per_device: 2}"], "micro-batches"),
        (["batch={global_sequences: 4, per_device: 3}"], "are not divisible into micro-batches of 3"),
        (["batch={global_sequences: 16, per_device: 1}", "model.layers=3"], "more than the 3 layers"),
    ],
)
def test_a_pipeline_that_will_be_refused_is_refused_before_it_is_built(changes, words, monkeypatch):
    def capture(*_, **__):
        raise AssertionError("built")

    monkeypatch.setattr(step_programs, "capture", capture)
    recipe = loads(RECIPE, ["cluster.nodes=2", "mesh={pp: 4, fsdp: 2, tp: 1}", "pipeline={schedule: 1f1b}",
                            "model.layers=8"])  # fmt: skip
    with pytest.raises(Mistakes, match=words):
        search.price_variant(with_changes(recipe, changes))


class InThisProcess:
    """`search.Helpers` whose work is done at once; it counts that."""

    started = 0

    def __init__(self, count: int):
        self.count = count

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def start(self, function, *args):
        InThisProcess.started += 1
        future = Future()
        future.set_result(function(*args))
        return future


@pytest.mark.parametrize("helpers", [InThisProcess, pytest.param(search.Helpers, marks=pytest.mark.slow)])
def test_a_search_in_several_processes_is_the_search_in_one(helpers, monkeypatch):
    recipe = loads(RECIPE, ["cluster.devices_per_node=2", "mesh.fsdp=2", "mesh.tp=1",
                            "batch.global_sequences=2", "batch.per_device=1"])  # fmt: skip
    priced, price = [], search.price_variant

    def counted(recipe, **more):
        priced.append(recipe)
        return price(recipe, **more)

    monkeypatch.setattr(search, "price_variant", counted)
    alone = search.search(recipe)
    count = len(priced)
    monkeypatch.setattr(search, "Helpers", helpers)
    monkeypatch.setattr(search, "LARGE", 0)
    told: list[str] = []
    assert search.search(recipe, told.append, processes=2) == alone
    if helpers is InThisProcess:
        assert InThisProcess.started and len(priced) == 2 * count, "nothing is priced twice"
    else:
        assert len(priced) < 2 * count
    assert len(told) == len(alone.candidates) + alone.refused


def test_helpers_import_no_file_of_the_working_directory(tmp_path, monkeypatch):
    """Such as a selectors.py, in place of Python's own."""
    for name in sys.stdlib_module_names:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the working directory was imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with search.Helpers(1) as helpers:
        assert helpers.start(os.getcwd).result(timeout=PATIENCE) == str(tmp_path)
    assert "PYTHONSAFEPATH" not in os.environ


def test_a_search_of_a_pipeline_tries_stages_and_schedules_and_none(monkeypatch):
    """The search keeps what the recipe sets, such as a named schedule."""
    tried: list[str] = []

    def quick(recipe, **_):
        pipeline = recipe.pipeline
        tried.append(
            "none" if pipeline is None else f"{pipeline.schedule} {recipe.mesh['pp']} x {pipeline.stages_per_device}"
        )
        return search_result.VariantPrice(1, 1.0 / recipe.mesh.get("pp", 1), 0.0, True)

    monkeypatch.setattr(search, "price_variant", quick)
    changes = ["cluster.nodes=2", "mesh={pp: 2, fsdp: -1}", "batch={global_sequences: 16}", "model.layers=8"]
    variants = search.search(loads(RECIPE, [*changes, "pipeline={micro_batches: null}"]))
    assert {"none", "1f1b 2 x 1", "1f1b 4 x 1", "1f1b 8 x 1", "zero_bubble 8 x 1"} < set(tried)
    assert variants.best is not None and variants.best.mesh["pp"] == 8
    tried.clear()
    search.search(loads(RECIPE, [*changes, "pipeline={schedule: zero_bubble, stages: 2}"]))
    assert set(tried) == {"none", "zero_bubble 2 x 1"}


@pytest.mark.slow
def test_a_search_plans_stages_schedules_and_micro_batches():
    """Each candidate is the plan of its changes, and the fastest is not slower than the best without stages."""
    recipe = loads(RECIPE, ["cluster={device: cpu, nodes: 2, devices_per_node: 1}", "mesh={fsdp: 2, tp: 1}",
                            "model.layers=4", "batch.global_sequences=8", "batch.per_device=null"])  # fmt: skip
    actual = search.search(recipe)
    piped = [c for c in actual.candidates if c.mesh.get("pp", 1) == 2]
    schedules = {with_changes(recipe, c.changes).pipeline.schedule for c in piped}
    assert {"1f1b", "interleaved_1f1b", "zero_bubble"} <= schedules and {c.per_device for c in piped} == {1, 2}
    for candidate in piped[:2]:
        planned = planner.report(with_changes(recipe, candidate.changes), "").pricing
        assert planned.step_s == pytest.approx(candidate.price.step_s, rel=1e-9)
    without = min(c.price.step_s for c in actual.candidates if c not in piped)
    assert actual.best is not None and actual.best.price.step_s <= without


def test_machines_are_told_the_suggestions_that_people_are(small, planned, monkeypatch):
    faster = Edit("remat: none", 2**20, planned.report.pricing.step_s / 2, True)
    fresh = partial(replace, planned.report)  # the command adds suggestions to its report
    monkeypatch.setattr(planner, "planned", lambda *_: replace(planned, report=fresh()))
    monkeypatch.setattr(suggest, "promising", lambda *_, **__: [faster])
    shown = command.run(loads(RECIPE), command.PlanOptions(dry_run=True)).text
    parsed = json.loads(command.run(loads(RECIPE), command.PlanOptions(dry_run=True, as_json=True)).text)
    assert "try: remat: none" in shown
    assert [edit["change"] for edit in parsed["suggestions"]] == ["remat: none"]


def test_the_fastest_is_saved_as_a_recipe_that_plans_as_it_was_found(small, capsys):
    overrides = ["cluster.devices_per_node=1", "mesh={fsdp: 1, tp: 1}", "batch={global_sequences: 1, per_device: 1}"]
    assert tpshard(["plan", "small.yaml", "--search", "--dry-run", *overrides]) == Exit.DONE
    assert [path.name for path in small.parent.iterdir()] == ["small.yaml"]
    capsys.readouterr()
    assert tpshard(["plan", "small.yaml", "--search", "--json", *overrides]) == Exit.DONE
    printed = capsys.readouterr()
    assert "tpshard train runs/small/fastest.yaml" in printed.err
    parsed = json.loads(printed.out)
    file = small.parent / "runs" / "small" / "fastest.yaml"
    assert file.read_text() == parsed["recipe"]
    assert tpshard(["validate", str(file)]) == Exit.DONE
    capsys.readouterr()
    assert tpshard(["plan", str(file), "--dry-run", "--json"]) == Exit.DONE
    planned = json.loads(capsys.readouterr().out)
    assert planned["time"]["step_s"] == pytest.approx(parsed["candidates"][0]["found"]["step_s"], rel=1e-6)


def test_what_a_search_finds_for_a_run_that_has_begun_is_saved_with_its_plans(small, monkeypatch):
    monkeypatch.setattr(command, "_answer_search", lambda recipe, options, tell, places: places)
    options = command.PlanOptions(search=True)
    assert command.run(loads(RECIPE, ["run.dir=r"]), options) == [Path("r/fastest.yaml")]
    Path("r").mkdir()
    Path("r/metrics.jsonl").touch()
    assert command.run(loads(RECIPE, ["run.dir=r"]), options) == [Path("r/plans/train/fastest.yaml")]


def test_a_search_that_finds_nothing_says_why(small, capsys, monkeypatch):
    assert tpshard(["plan", "small.yaml", "--search", "cluster.device=nowhere.yaml"]) == Exit.RECIPE
    assert "nowhere.yaml" in capsys.readouterr().err
    too_much = lambda recipe, **_: search_result.VariantPrice(2**40 + recipe.batch.per_device, 1.0, 0.0, False)  # noqa: E731
    monkeypatch.setattr(search, "price_variant", too_much)
    assert tpshard(["plan", "small.yaml", "--search"]) == Exit.FIT
    assert "the smallest needs 1.00 TiB a device: " in capsys.readouterr().out
    assert [path.name for path in small.parent.iterdir()] == ["small.yaml"]
