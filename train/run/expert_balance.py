"""The balance of tokens over experts in a step, for a run's metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def balance(counted: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    """The balance of one step, from `PATH.load` (tokens of each expert) and `PATH.dropped` (tokens without a slot).

    `busiest`: the largest number of tokens of an expert over its layer's mean, in the worst layer. `dropped`: the share
    of all choices that no expert computed. `load`: per layer, each expert's tokens over the mean. None without experts.
    """
    loads = [list(numbers) for name, numbers in counted.items() if name.endswith(".load")]
    if not loads:
        return None
    shares = [[round(n * len(load) / max(1.0, sum(load)), 4) for n in load] for load in loads]
    dropped = sum(sum(numbers) for name, numbers in counted.items() if name.endswith(".dropped"))
    return {
        "busiest": max(max(share) for share in shares),
        "dropped": dropped / max(1.0, sum(map(sum, loads))),
        "load": shares,
    }
