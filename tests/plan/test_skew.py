"""An uneven routing is priced: dropped tokens with a capacity, the busiest device's extra work without."""

from __future__ import annotations

import pytest
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.plan.planner import price_training
from tpshard.plan.step.skew import Skew, skew
from tpshard.programs.setting.cluster import devices_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads

RECIPE = """
name: routed
cluster: {device: cpu}
mesh: {fsdp: 1, ep: 2}
model: {preset: tiny-moe, layers: 1}
batch: {global_sequences: 4}
"""


def skewed(busiest: float, *overrides: str) -> Skew:
    recipe = loads(RECIPE, overrides)
    setting = Setting.of(recipe, devices_of(recipe))
    return skew(price_training(training.build(setting)), setting, busiest)


def test_without_a_capacity_the_others_wait_for_the_busiest_device() -> None:
    """Of a device's 4 experts one gets twice the mean, and the others 6/7 each."""
    priced = skewed(2.0, "model.capacity=null")
    assert (priced.balanced.busiest_device, priced.balanced.dropped, priced.skewed.dropped) == (1.0, 0.0, 0.0)
    assert priced.skewed.busiest_device == pytest.approx((2 + 3 * 6 / 7) / 4)
    assert priced.skewed.step_s > priced.balanced.step_s
    assert priced.skewed.workspace_bytes == 2 * priced.balanced.workspace_bytes > 0


def test_a_gpu_computes_all_experts_at_once() -> None:
    """Its temporaries are those of all choices, eight times an expert's mean, however they are routed."""
    on_gpu = skewed(2.0, "model.capacity=null", "cluster.device=h100-sxm-80g", "model.dtype=fp32")
    on_cpu = skewed(2.0, "model.capacity=null", "model.dtype=fp32")
    assert on_gpu.skewed.workspace_bytes == on_gpu.balanced.workspace_bytes == 8 * on_cpu.balanced.workspace_bytes


def test_with_a_capacity_time_stays_and_what_is_beyond_is_dropped() -> None:
    priced = skewed(2.0, "model.capacity=1.25")
    assert priced.skewed.step_s == priced.balanced.step_s and priced.balanced.dropped == 0
    assert priced.skewed.dropped == pytest.approx((2 - 1.25) / 8)


def test_what_no_routing_reaches_is_refused() -> None:
    with pytest.raises(Mistakes, match="no expert can get") as error:
        skewed(4.5)
    assert error.value.exit == Exit.USAGE
    with pytest.raises(Mistakes, match="needs a model with experts") as other:
        skewed(1.5, "model.preset=tiny", "mesh={fsdp: 2}")
    assert other.value.exit == Exit.FIT
