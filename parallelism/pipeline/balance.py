"""Splitting a model's layers into pipeline stages so that the slowest device is as fast as possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate


def balance(layers: Sequence[float], before: float, after: float, devices: int, rounds: int = 1) -> list[int]:
    """Divides layers into `devices` x `rounds` stages; returns the number of layers of each stage, at least one.

    layers: seconds of each, in order. before, after: seconds of the other work of the first and the last stage. Stage i
    runs on device i mod `devices`. The slowest device is as fast as possible (with several rounds, if the layers are
    equal). Among such splits the other devices are as fast as possible, and the first ones, which hold the most
    micro-batches, have the fewest layers. Raises ValueError for fewer layers than stages.
    """
    stages = devices * rounds
    if not 0 < stages <= len(layers):
        raise ValueError(f"{len(layers)} layers are not enough for {stages} stages")
    counts = _least_slowest(layers, before, after, stages)
    upto = [0.0, *accumulate(layers)]
    unit = (upto[-1] + before + after) * 1e-9 or 1.0  # sums of the same numbers in another order count as equal

    def slowness(counts: Sequence[int]) -> tuple[list[int], list[int], Sequence[int]]:
        ends = list(accumulate(counts))
        loads = [upto[end] - upto[end - n] for end, n in zip(ends, counts)]
        loads[0] += before
        loads[-1] += after
        of_devices = [sum(loads[device::devices]) for device in range(devices)]
        parts = [sorted((round(load / unit) for load in seconds), reverse=True) for seconds in (of_devices, loads)]
        return parts[0], parts[1], counts

    now, better = slowness(counts), True
    while better:
        better = False
        for receiver in range(stages):
            for giver in range(stages):
                if receiver != giver and counts[giver] > 1:
                    moved = [n + (i == receiver) - (i == giver) for i, n in enumerate(counts)]
                    if (then := slowness(moved)) < now:
                        counts, now, better = moved, then, True
    return counts


def _least_slowest(layers: Sequence[float], before: float, after: float, stages: int) -> list[int]:
    """The split with the fastest slowest stage, by dynamic programming over stages and layers."""
    upto = [0.0, *accumulate(layers)]
    upto = [0.0, *(before + seconds for seconds in upto[1:-1]), before + upto[-1] + after]
    best = [0.0, *[math.inf] * len(layers)]
    starts: list[list[int]] = []
    for stage in range(stages):
        row, start = [math.inf] * len(best), [0] * len(best)
        for end in range(stage + 1, len(layers) - (stages - stage - 1) + 1):
            row[end], start[end] = min((max(best[i], upto[end] - upto[i]), i) for i in range(stage, end))
        best = row
        starts.append(start)
    counts, end = [], len(layers)
    for start in reversed(starts):
        counts.append(end - start[end])
        end = start[end]
    return counts[::-1]
