"""Reserved memory: a step's allocations, replayed, take what the liveness of its programs says, and a little more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tpshard.parallelism.pricing.allocator import PAGE, CachingAllocator
from tpshard.plan.step import reserve
from tpshard.plan.step.step_price import price_training
from tpshard.programs.setting.cluster import devices_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.variants import Variants
from tpshard.recipes.reading.load import load, with_changes

STAGES = ["mesh.pp=2", "mesh.fsdp=16"]


class Counting(CachingAllocator):
    """Counts the most that is allocated at once."""

    most = 0

    def malloc(self, size: int) -> int:
        key = super().malloc(size)
        Counting.most = max(Counting.most, self.allocated)
        return key


@pytest.mark.parametrize(
    ("changes", "apart"),
    [
        ([], 0.002),
        (["remat=full", "batch.per_device=2"], 0.002),
        (["fsdp.accumulate.gather=step"], 0.002),
        ([*STAGES, "pipeline.schedule=1f1b"], 0.02),
        ([*STAGES, "pipeline.schedule=gpipe"], 0.02),
        ([*STAGES, "pipeline.schedule=zero_bubble"], 0.04),
    ],
    ids=["step", "remat", "gathered", "1f1b", "gpipe", "zero_bubble"],
)
def test_what_is_replayed_is_what_lives(changes: list[str], apart: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "CachingAllocator", Counting)
    monkeypatch.setattr(Counting, "most", 0)
    recipe = with_changes(load("llama3-8b"), ["model.layers=2", "batch.global_sequences=128", *changes])
    pricing = price_training(Variants().for_prices(Setting.of(recipe, devices_of(recipe))))
    assert Counting.most == 0, "nothing is replayed until it is asked for"
    assert pricing.peak_bytes <= pricing.reserved_bytes < 1.35 * pricing.peak_bytes
    assert Counting.most == pytest.approx(pricing.peak_bytes, rel=apart)
    segmented = pricing.segmented_bytes
    assert segmented is not None and segmented % (2 * 2**20) == 0
    full = replace(pricing.device, memory_bytes=pricing.peak_bytes + pricing.device.context_bytes + 2 * PAGE)
    assert pricing.replay is not None
    assert pricing.replay.reserved_bytes(full) <= full.memory_bytes - full.context_bytes + PAGE
