"""The layers dealt to stages are the best of all possible splits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from tpshard.parallelism.pipeline.balance import balance


def splits(layers: int, stages: int) -> Iterator[list[int]]:
    for cuts in combinations(range(1, layers), stages - 1):
        yield [end - start for start, end in zip((0, *cuts), (*cuts, layers))]


def slowest(split: Sequence[int], layers: Sequence[float], before: float, after: float, devices: int) -> float:
    ends = [sum(split[: i + 1]) for i in range(len(split))]
    loads = [sum(layers[end - count : end]) for end, count in zip(ends, split)]
    loads[0] += before
    loads[-1] += after
    return max(sum(loads[device::devices]) for device in range(devices))


def test_no_split_has_a_faster_slowest_device() -> None:
    draw = random.Random(0)
    for _ in range(60):
        count = draw.randint(2, 9)
        devices, alike = draw.randint(1, min(count, 4)), draw.random() < 0.5
        rounds = draw.randint(1, count // devices) if alike else 1
        layers = [1.0 if alike else draw.uniform(0.5, 2.0) for _ in range(count)]
        before, after = draw.uniform(0, 3), draw.uniform(0, 6)
        actual = balance(layers, before, after, devices, rounds)
        assert sum(actual) == count and len(actual) == devices * rounds and min(actual) > 0
        best = min(slowest(s, layers, before, after, devices) for s in splits(count, devices * rounds))
        assert slowest(actual, layers, before, after, devices) == pytest.approx(best, rel=1e-6)


def test_the_first_devices_have_the_fewest_layers_where_that_costs_nothing() -> None:
    assert balance([1.0] * 7, 0, 0, 3) == [2, 2, 3] and balance([1.0] * 7, 0, 1, 3) == [2, 3, 2]


def test_every_stage_needs_a_layer() -> None:
    with pytest.raises(ValueError, match="3 layers are not enough for 4 stages"):
        balance([1.0] * 3, 0, 0, 2, 2)
