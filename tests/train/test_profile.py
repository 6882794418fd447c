"""Profiled steps name what they ran as the plan does, compute the same, and are compared with the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tpshard.parallelism.node_info import Collective
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.step_profile import OperationEvent
from tpshard.plan.questions import plan_error
from tpshard.plan.views import trace
from tpshard.recipes.reading.load import loads
from tpshard.train.records.profile_report import differences, trace_of
from tpshard.train.records.records import read_rows
from training_cases import train_recipe

RECIPE = """
name: seen
cluster: {device: cpu}
mesh: {fsdp: 2}
model: {preset: tiny, layers: 2, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64, seq_len: 64}
batch: {global_sequences: 8, per_device: 2}
compile: eager
train: {steps: 5}
evaluate: {every_steps: 3, sequences: 2}
checkpoint: {every_steps: 0}
logging: {every_steps: 1, wandb: null}
"""


def train(context: Context, folder: str, *overrides: str) -> None:
    recipe = loads(RECIPE, [f"run.dir={folder}", *overrides])
    train_recipe(context, recipe)


def named(events: list[dict[str, Any]]) -> set[tuple[str, ...]]:
    """What is computed and moved where, as a trace names it."""
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    return {
        (lanes[e["tid"]], e["args"]["part"], e["args"]["module"], e["args"]["phase"], e["args"].get("kind", ""))
        for e in events
        if e["ph"] == "X" and lanes[e["tid"]] != "wait"
    }


def test_a_real_step_is_traced_beside_the_planned_one(pool: Any, tmp_path: Path) -> None:
    pool.run(train, str(tmp_path / "plain"), world=2, mesh={"dp": 1, "fsdp": 2, "tp": 1})
    pool.run(
        train, str(tmp_path / "seen"), "train.profile={steps: [3, 4]}", world=2, mesh={"dp": 1, "fsdp": 2, "tp": 1}
    )
    losses = [
        [row["loss"] for row in read_rows(tmp_path / run / "metrics.jsonl") if row.get("loss")]
        for run in ("plain", "seen")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 5
    place = tmp_path / "seen" / "profile"
    planned, real = (json.loads((place / f"{name}.trace.json").read_text()) for name in ("planned", "steps-3-4"))
    expected = {one for one in named(planned["traceEvents"]) if one[4]}
    actual = named(real["traceEvents"])
    assert expected and expected <= actual, "every planned collective ran, under its name and on its lane"
    layers = {one[2] for one in actual if one[2].startswith("layers.1.")}
    assert {"layers.1.attention", "layers.1.mlp"} <= layers
    assert {one[1] for one in actual} == {"micro-batch", "update"}, "the evaluation after step 3 is no part of a step"
    rows = json.loads((place / "steps-3-4.differences.json").read_text())
    apart = [abs(row["measured_s"] - row["planned_s"]) for row in rows]
    assert len(rows) == 10 and apart == sorted(apart, reverse=True)


def test_the_largest_differences_are_of_one_run_of_each_part() -> None:
    gather = Collective("all_gather", ("fsdp",), ("fsdp",), 64, "fp32")
    planned = trace_of([
        OperationEvent("compute", "mm", 0.0, 1.0, "layers.0.mlp", "forward", "micro-batch"),
        OperationEvent("compute", "mm", 1.0, 2.0, "layers.1.mlp", "forward", "micro-batch"),
        OperationEvent("fsdp", "w", 0.0, 0.5, "layers.0.mlp", "forward", "micro-batch", comm=gather),
    ])  # fmt: skip
    twice = trace_of([
        OperationEvent("compute", "mm", float(i), i + 0.75, f"layers.{i % 2}.mlp", "forward", "micro-batch")
        for i in range(4)
    ])  # fmt: skip
    rows = differences(planned, twice, {"micro-batch": 2})
    assert [(row["planned_s"], row["measured_s"]) for row in rows] == [(2.0, 1.5), (0.5, 0.0)]
    assert rows[0]["name"] == "micro-batch: layers.*.mlp, forward, computing"
    assert rows[1]["name"].endswith("all_gather over fsdp")


def test_the_comparison_is_one_line_without_times_of_another_machine(pool: Any, tmp_path: Path) -> None:
    pool.run(train, str(tmp_path / "run"), "mesh={fsdp: 1}", world=1)
    line = plan_error.record(tmp_path / "run")
    assert line.startswith("planned against measured: ") and "\n" not in line
    assert "peak_memory_bytes" in line and "step_s" not in line and "tokens_per_s" not in line
    assert "step_s" in json.loads((tmp_path / "run" / "plan_measured.json").read_text()), "the file has all figures"
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    plan["plan"]["device"]["name"] = "mine.yaml"
    (tmp_path / "run" / "plan.json").write_text(json.dumps(plan))
    assert "step_s" in plan_error.record(tmp_path / "run")


def test_planned_and_real_traces_have_one_format() -> None:
    assert trace.trace is not None
    real = trace_of([OperationEvent("compute", "mm", 0.0, 1.0, "m", "forward", "micro-batch", 5)])
    assert real["traceEvents"][-1]["args"] == {"module": "m", "phase": "forward", "part": "micro-batch", "flops": 5}


@pytest.mark.parametrize("steps", ["[0, 2]", "[3]", "3"])
def test_steps_are_two_numbers_from_1(steps: str) -> None:
    with pytest.raises(Exception, match=r"train\.profile\.steps"):
        loads(RECIPE, [f"train.profile={{steps: {steps}}}"])
