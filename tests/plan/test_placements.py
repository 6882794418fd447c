"""`plan --net` shows the links of each axis, and the step on other orders of the axes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tpshard.cli.main import run as tpshard
from tpshard.plan import planner
from tpshard.plan.questions import placements
from tpshard.recipes.reading.load import loads

DEVICE = """schema: 1
name: pod
kind: gpu
backend: nccl
memory: 80 GiB
memory_bandwidth: 3.35 TB/s
rates: {bf16: 989 TFLOP/s}
host: {devices: 2}
levels:
  - {name: nvlink, devices: 2, bandwidth: 450 GB/s, latency: 1 us}
  - {name: leaf, hosts: 2, bandwidth: 10 GB/s, latency: 12 us}
  - {name: spine, bandwidth: 10 GB/s, latency: 20 us, oversubscribed: 8}
"""
RECIPE = """name: tiny
model: {{preset: tiny, layers: 1, seq_len: 32}}
cluster: {{device: {file}, nodes: 4, devices_per_node: 2}}
mesh: {{dp: 2, fsdp: 2, tp: 2}}
batch: {{global_sequences: 8}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "pod.yaml").write_text(DEVICE)
    return RECIPE.format(file=tmp_path / "pod.yaml")


def test_an_order_of_axes_is_priced_where_its_devices_are(recipe: str) -> None:
    parsed = loads(recipe)
    planned = planner.planned(parsed, "")
    actual, report = placements.net(planned, parsed), planned.report
    assert {place.axis: dict(place.levels) for place in actual.places} == {
        "dp": {"spine": 2}, "fsdp": {"leaf": 2}, "tp": {"nvlink": 2},
    }  # fmt: skip
    own = placements.price_order(planned, tuple(report.job.mesh))
    assert (own.step_s, own.comm_s, own.exposed_s) == pytest.approx(
        (report.pricing.step_s, report.pricing.comm_s, report.pricing.exposed_s)
    )
    first, *others = actual.placements
    assert first.order[-1] == "tp" and len(others) == 5 and others == sorted(others, key=lambda one: one.step_s)
    assert all(one.whole for one in others)  # as a recipe of that order would be planned
    other = next(one for one in others if one.order[-3:] == ("tp", "fsdp", "dp"))
    swapped = recipe.replace("{dp: 2, fsdp: 2, tp: 2}", "{tp: 2, fsdp: 2, dp: 2}")
    assert swapped != recipe
    built = planner.report(loads(swapped), "").pricing
    assert (other.step_s, other.comm_s) == pytest.approx((built.step_s, built.comm_s))
    assert len({round(one.comm_s, 9) for one in actual.placements}) > 3  # the orders are not one and the same


def test_the_command_says_where_axes_run(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(recipe)
    assert tpshard(["plan", str(file), "--net", "--json"]) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert [level["name"] for level in parsed["levels"]] == ["nvlink", "leaf", "spine"]
    assert {row["level"] for row in parsed["collectives"]} <= {"nvlink", "leaf", "spine"}
    assert not list(tmp_path.glob("runs"))
    assert tpshard(["plan", str(file), "--net", "--for", "decode"]) == 2
    assert tpshard(["plan", str(file), "--net", "--search"]) == 2
