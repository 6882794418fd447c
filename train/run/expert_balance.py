"""The balance of tokens over experts in a step, for a run's metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def balance(counted: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    """The balance of one step, from `PATH.load` (tokens of each expert), `PATH.dropped` and `PATH.gathered` (choices
    without a slot).

    `busiest`: the largest number of tokens of an expert over its layer's mean, in the worst layer. `dropped`: the share
    of all choices that no expert computed. `gathered`, of tokens that travel by slots: the share of those that found
    none and were gathered. `load`: per layer, each expert's tokens over the mean. None without experts.
    """
    loads = [list(numbers) for name, numbers in counted.items() if name.endswith(".load")]
    if not loads:
        return None
    shares = [[round(n * len(load) / max(1.0, sum(load)), 4) for n in load] for load in loads]
    choices = max(1.0, sum(map(sum, loads)))
    without = {
        label: [sum(numbers) for name, numbers in counted.items() if name.endswith(f".{label}")]
        for label in ("dropped", "gathered")
    }
    gathered = {"gathered": sum(without["gathered"]) / choices} if without["gathered"] else {}
    return {
        "busiest": max(max(share) for share in shares), "dropped": sum(without["dropped"]) / choices, **gathered,
        "load": shares,
    }  # fmt: skip
