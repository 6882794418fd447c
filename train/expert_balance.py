"""How evenly tokens went to experts, of what the modules counted: for the record of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def balance(counted: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    """From `PATH.load` (tokens of each expert) and `PATH.dropped` (tokens that found no slot) of one step:

    `busiest`: most tokens of one expert over the mean of its layer, in the worst layer; `dropped`: share of all choices
    that no expert computed; `load`: per layer the experts' tokens over the mean. None for a model without experts.
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
