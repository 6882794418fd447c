"""A pipeline's plan has the time of its schedule and the memory that the schedule holds, and shows both."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from small_model import of_small_model
from tpshard.devices import read
from tpshard.parallelism.pipeline.stepping import RECEIVES_AHEAD
from tpshard.parallelism.pricing.cost import Cpu, Crowd
from tpshard.plan import planner, saved_plan
from tpshard.plan.questions import diff, pass_prices, plan_error
from tpshard.plan.report import screen
from tpshard.plan.report.planned import Planned
from tpshard.plan.report.report import Report
from tpshard.plan.search import search, search_pipelines, suggest
from tpshard.plan.search.search_result import VariantPrice
from tpshard.plan.step.figures import PricedPipeline
from tpshard.plan.step.step_price import price_step
from tpshard.plan.views import page, pictures, trace
from tpshard.programs.setting.cluster import devices_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import loads

RECIPE = of_small_model(
    """
name: staged
cluster: {device: cpu}
mesh: {pp: 2}
batch: {global_sequences: 8, per_device: 1}
compile: eager
""",
    layers=4,
)


@cache
def plan_recipe(schedule: str) -> Report:
    return plan_programs(schedule).report


@cache
def plan_programs(schedule: str) -> Planned:
    return planner.planned(loads(RECIPE, [f"pipeline.schedule={schedule}"]), "staged.yaml")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_a_step_is_the_schedule_and_what_runs_once(schedule: str) -> None:
    report = plan_recipe(schedule)
    actual = report.pricing.pipeline
    assert actual is not None
    slots = {d: [s for s in actual.slots if actual.table.device_of(s.task.stage) == d] for d in range(2)}
    for device, (mine, priced) in enumerate(zip(slots.values(), actual.devices)):
        assert all(a.end <= b.start for a, b in pairwise(mine)), "a device does one thing at a time"
        assert priced.busy_s == pytest.approx(sum(s.end - s.start for s in mine))
        assert priced.held == actual.table.most_held(device)
    assert actual.seconds == max(s.end for s in actual.slots)
    assert actual.bubble == pytest.approx(1 - sum(d.busy_s for d in actual.devices) / (2 * actual.seconds))
    assert report.pricing.step_s == pytest.approx(
        actual.seconds + max(d.once_s for d in actual.devices) + report.pricing.fixed_s
    )
    busy = sum(p.seconds for p in report.pricing.parts)
    assert report.pricing.step_s == pytest.approx(busy + actual.idle_s + report.pricing.fixed_s)


def test_memory_is_what_the_schedule_holds() -> None:
    """GPipe stores all micro-batches; 1F1B stores at most as many as there are stages."""
    gpipe, one = plan_recipe("gpipe").pricing.pipeline, plan_recipe("1f1b").pricing.pipeline
    assert gpipe is not None and one is not None
    assert [s.saved_bytes for s in gpipe.stages] == [s.saved_bytes for s in one.stages]
    assert [d.held for d in gpipe.devices] == [8, 8] and [d.held for d in one.devices] == [2, 1]
    for i, (more, less) in enumerate(zip(gpipe.devices, one.devices)):
        saved_bytes = gpipe.stages[i].saved_bytes
        # beside it are the receives that are posted for the next tasks, whose number depends on the order of the tasks
        received = more.peak_bytes - less.peak_bytes - (more.held - less.held) * saved_bytes
        assert abs(received) in [n * gpipe.stages[1 - i].sent_bytes for n in range(RECEIVES_AHEAD + 1)]


def test_stages_take_turns_on_the_cores_of_a_host_and_messages_take_time_of_them() -> None:
    setting = Setting.of(loads(RECIPE, ["mesh.pp=4", "pipeline.schedule=1f1b"]))
    programs = training.build(setting)
    base = read.device("cpu")

    def priced(cores: int, message_s: float = 0.0) -> PricedPipeline:
        crowds = {1: Crowd(), 4: Crowd(compute=4 / cores, memory=4 / cores, overhead=1.0, message_s=message_s)}
        machine = replace(base, cpu=Cpu(cores=cores, crowds=crowds))
        priced = price_step(programs, machine, 4, "none").pipeline
        assert priced is not None
        return priced

    four, two = priced(4), priced(2)
    assert [d.busy_s for d in two.devices] == pytest.approx([d.busy_s for d in four.devices], rel=0.5)
    assert two.seconds >= sum(d.busy_s for d in two.devices) / 2 and two.seconds < 2 * four.seconds
    assert two.bubble < four.bubble, "who waits leaves its core to others"
    more = priced(4, message_s=1.0)
    # of one micro-batch: an inner stage receives and sends in both directions, the first and the last stage in one
    for stage, (before, after) in enumerate(zip(four.stages, more.stages)):
        messages = 2 if stage in (0, 3) else 4
        assert sum(after.seconds.values()) - sum(before.seconds.values()) == pytest.approx(messages / 2)
        assert after.late_s == pytest.approx(before.late_s)


def test_stages_share_the_parameters() -> None:
    report = plan_recipe("1f1b")
    one = planner.report(loads(RECIPE, ["mesh.pp=1", "mesh.fsdp=1"]), "one.yaml")
    assert report.job.params == one.job.params
    assert report.pricing.useful_flops == pytest.approx(one.pricing.useful_flops, rel=1e-3)
    assert not [w for w in report.warnings if "compute the same" in w], "stages compute different layers"
    assert report.pricing.static_bytes["parameters"] < 0.7 * one.pricing.static_bytes["parameters"]


def test_a_pipeline_is_shown_everywhere() -> None:
    planned = plan_programs("1f1b")
    report, drawing = planned.report, planned.drawing
    shown = screen.screen(report)
    assert "PIPELINE  1f1b, 2 stages, 8 micro-batches: " in shown and "waiting for other stages" in shown
    assert "F0 F1" in screen.screen(report, verbose=True)
    parsed = json.loads(json.dumps(report.to_json()))["pipeline"]
    assert parsed["bubble"] > 0 and len(parsed["stages"]) == 2 and parsed["micro_batches"] == 8
    assert "1f1b:" in pictures.svg(report, drawing) and 'id="pipeline"' in page.page(report, drawing)
    lanes = [e for e in json.loads(trace.trace(report, drawing))["traceEvents"] if e["pid"] == 1 and e["ph"] == "X"]
    assert len(lanes) == 2 * 2 * 8
    assert {"send", "recv"} <= {line.kind for line in report.lines}
    programs = plan_programs("1f1b").step
    planned = plan_programs("1f1b").fingerprints
    assert planned.items() < programs.fingerprints.items() and len(planned) == len(programs.programs) + 1


def test_a_run_of_stages_is_compared_with_the_waiting_for_each_other(tmp_path: Path) -> None:
    report = plan_recipe("1f1b")
    saved_plan.write(
        tmp_path / "plan.json", saved_plan.dumps(plan_programs("1f1b"), loads(RECIPE, ["pipeline.schedule=1f1b"]))
    )
    planned = report.to_json()["pipeline"]
    waited = planned["seconds"] - planned["by_device"][0]["busy_s"]
    rows = [{"step": i, "loss": 1.0, "step_s": 1.0, "exposed_comm_s": 2 * waited} for i in range(4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    compared = plan_error.compare(tmp_path)
    assert compared is not None and compared["exposed_comm_s"]["error"] == pytest.approx(-0.5)
    assert waited > 10 * report.pricing.exposed_s


def test_passes_on_stages_end_in_the_step_that_is_planned() -> None:
    recipe = loads(RECIPE, ["pipeline.schedule=1f1b", "mesh={pp: 2, fsdp: 2}", "batch.per_device=1"])
    rows = pass_prices.rows(Setting.of(recipe, devices_of(recipe)))
    pricing = planner.report(recipe, "staged.yaml").pricing
    names = [row.name for row in rows]
    assert names[:4] == ["recompute", "simplify", "accumulate", "bucket"] and names[-1] == "sink_waits"
    assert (rows[-1].step_s, rows[-1].peak_bytes) == (pricing.step_s, pricing.peak_bytes)
    assert rows[3].collectives < rows[2].collectives == rows[0].collectives


def test_a_plan_with_stages_differs_from_one_without_by_what_stages_send() -> None:
    staged, whole = plan_recipe("1f1b"), planner.report(loads(RECIPE, ["mesh={pp: 1, fsdp: 2}"]), "one.yaml")
    actual = diff.diff(whole, staged)
    kinds = {row["kind"]: row["count"] for row in actual["collectives"] if row["axes"] == "pp"}
    assert {"send", "recv"} <= kinds.keys() and all(before == 0 for before, _ in kinds.values())
    gathers = [row["count"] for row in actual["collectives"] if row["axes"] == "fsdp" and row["kind"] == "all_gather"]
    assert gathers and all(after == 0 for _, after in gathers)
    step = actual["figures"]["step_s"]
    assert (step["before"], step["after"]) == (whole.pricing.step_s, staged.pricing.step_s)
    assert "send over pp" in diff.text(actual)
    assert "PIPELINE  none -> 1f1b, 2 stages, 8 micro-batches: " in diff.text(actual)
    assert diff.diff(staged, staged)["collectives"] == []


def test_a_pipeline_that_waits_is_told_schedules_that_wait_less(monkeypatch: pytest.MonkeyPatch) -> None:
    report, recipe = plan_recipe("1f1b"), loads(RECIPE, ["pipeline.schedule=1f1b"])
    less = plan_recipe("zero_bubble").pricing
    assert report.pricing.pipeline is not None and less.pipeline is not None
    assert report.pricing.pipeline.bubble > 0.1 and less.pipeline.bubble < report.pricing.pipeline.bubble
    changes = list(search_pipelines.faster(report, recipe))
    assert changes == [["pipeline.schedule=interleaved_1f1b"], ["pipeline.schedule=zero_bubble"]]

    def priced(recipe: Recipe, *_: object) -> VariantPrice:
        assert recipe.pipeline is not None
        faster = recipe.pipeline.schedule == "zero_bubble"
        return VariantPrice(1, report.pricing.step_s * (0.9 if faster else 1.1), 0.0, True)

    monkeypatch.setattr(search, "price_variant", priced)
    assert [edit.change for edit in suggest.promising(report, recipe)] == ["pipeline.schedule: zero_bubble"]
