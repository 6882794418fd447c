"""`--fit` and `--pin` write recipes that plan as promised, and `--check` compares a run with its plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_recipe import RECIPE, tight_device
from tpshard.cli.main import run as tpshard
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.plan import planner, saved_plan
from tpshard.plan.questions import check_run, fitting, pinning
from tpshard.plan.report.planned import Planned
from tpshard.plan.search.search import price_variant
from tpshard.recipes.reading.load import loads, with_changes

CHANGES = [
    "cluster.device=tight.yaml", "cluster.devices_per_node=3", "mesh.fsdp=3", "mesh.tp=1", "model.vocab=32768",
    "model.seq_len=128", "batch.per_device=4", "batch.global_sequences=12", "fsdp.reshard_after_forward=false",
    "remat=none",
]  # fmt: skip


def test_the_edits_that_fit_are_all_needed_and_harm_as_little_as_can_be(small: Path) -> None:
    def tight(memory: float) -> None:
        (small.parent / "tight.yaml").write_text(tight_device(memory))

    tight(4)
    needs = {
        words: price_variant(loads(RECIPE, [*CHANGES, *changes])).needed_bytes * 3 / 2**30
        for words, changes in {"all": (), "half": ("batch.per_device=2",)}.items()
    }
    tight((needs["all"] + needs["half"]) / 2)
    recipe = loads(RECIPE, CHANGES)
    actual = fitting.fit(planner.report(recipe, "small.yaml"), recipe)
    assert price_variant(loads(actual.recipe)).fits and actual.price.fits
    assert actual.harms == sorted(actual.harms)
    subsets = [[c for c in actual.changes if c != change] for change in actual.changes]
    assert subsets and not any(price_variant(with_changes(recipe, changes)).fits for changes in subsets)
    tight(0.25)
    recipe = loads(RECIPE, [*CHANGES, "model.vocab=131072", "model.seq_len=512"])
    with pytest.raises(Mistakes) as refused:
        fitting.fit(planner.report(recipe, "small.yaml"), recipe)
    assert refused.value.exit == Exit.FIT


def test_pinned_shardings_are_those_inferred_and_no_rule_changes_them(planned: Planned) -> None:
    recipe = loads(RECIPE)
    actual = pinning.pin(planned, recipe)
    assert {"layers.*.mlp.up.weight", "layers.*.residual", "tok_embed.weight"} <= actual.pins.keys()
    for changes in ([], ["sharding.rules.mlp=null", "sharding.rules.heads=null", "sharding.rules.vocab=null"]):
        again = planner.planned(loads(actual.recipe, changes), "")
        assert again.fingerprints == planned.fingerprints
    assert planner.report(loads(RECIPE, ["sharding.rules.mlp=null"]), "").fingerprint != planned.report.fingerprint


def test_the_options_print_recipes_that_load(small: Path, capsys: Any) -> None:
    for option, file in (("--fit", "fits.yaml"), ("--pin", "pinned.yaml")):
        assert tpshard(["plan", "small.yaml", option]) == Exit.DONE
        printed = capsys.readouterr().out
        assert loads(printed).mesh == loads(RECIPE).mesh
        assert (small.parent / "runs" / "small" / file).read_text() == printed
    assert tpshard(["plan", "small.yaml", "--fit", "--pin"]) == Exit.USAGE


@pytest.fixture
def folder(planned: Planned, tmp_path: Path) -> Path:
    (tmp_path / "plan.json").write_text(saved_plan.dumps(planned, loads(RECIPE)))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def ran(folder: Path, **factors: float) -> check_run.RunFinding:
    """Writes a run that equals its plan except for these factors."""
    plan = saved_plan.read(str(folder / "plan.json")).printed
    row = {
        "step_s": plan["time"]["step_s"], "exposed_comm_s": plan["time"]["exposed_comm_s"],
        "peak_memory_bytes": plan["memory"]["peak_bytes"],
        "sent_bytes": sum(line["wire_bytes"] for line in plan["collectives"]),
        "collectives": sum(line["count"] for line in plan["collectives"]),
    }  # fmt: skip
    steps = [{"step": n, "loss": 1.0, "run": 1} | {k: v * factors.get(k, 1) for k, v in row.items()} for n in range(9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return check_run.check(folder)


def test_a_run_is_held_against_its_plan_figure_by_figure(folder: Path, capsys: Any) -> None:
    as_planned = ran(folder)
    assert {row.verdict for row in as_planned.rows} == {"exact", "as planned"} and not as_planned.distrust
    slower = ran(folder, step_s=2)
    assert [row.figure for row in slower.rows if row.verdict == "off"] == ["step_s"]
    assert slower.distrust and all(words.startswith("constants.") for words in slower.distrust)
    waited = ran(folder, step_s=2, exposed_comm_s=50)
    assert any(words.startswith("inside: bandwidth") for words in waited.distrust)
    other = {row.figure: row.verdict for row in ran(folder, sent_bytes=1.5).rows}
    assert other["sent_bytes"].startswith("wrong") and other["collectives"] == "exact"
    assert tpshard(["plan", "--check", str(folder), "--json"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out)["device"] == "cpu"
    (folder / "metrics.jsonl").unlink()
    assert tpshard(["plan", "--check", str(folder)]) == Exit.RECIPE
