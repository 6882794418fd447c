"""Fits the constants of engines, kernels and devices on published servers, for `serving_accuracy.py --fit`.

Each figure's error counts as a logarithm, large ones by their size and not by its square: some rows are wrong. A
constant is drawn to the value that it has, so that those that no row tells apart stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from published_servers import Constants, ServedRow, device_of

HOST = ("host_s", "row_s", "peers_s", "request_s", "launch_s", "narrow")
KERNELS = ("cache", "gap_s", "unpacked", "converted", "experts", "attention", "hops")
DRAWN = 0.15
"""How much a constant's distance from its present value counts, as the square of a logarithm."""
LARGE = 0.15
"""The error above which errors count by their size."""
MOST = 0.95
"""The largest share."""


class Errors(Protocol):
    """What a fit reads of an outcome."""

    @property
    def errors(self) -> dict[str, float]: ...


def fit(
    rows: Sequence[ServedRow], outcome_of: Callable[[ServedRow, Constants], Errors], rounds: int,
    say: Callable[[str], None],
) -> dict[str, float]:  # fmt: skip
    """The constants with which the rows' errors are least, by turns: each is moved while that helps."""
    own = constants_of(rows)
    best, steps = dict(own), dict.fromkeys(own, 0.3)

    def loss(constants: dict[str, float], of: Sequence[ServedRow]) -> float:
        errors = (
            error for row in of for name, error in outcome_of(row, constants).errors.items() if "above" not in name
        )
        drawn = sum(math.log(value / own[name]) ** 2 for name, value in constants.items())
        return DRAWN * drawn + sum(_weight(math.log1p(error)) for error in errors)

    for _ in range(rounds):
        for name in best:
            of = [row for row in rows if name.partition("/")[0] in ("kernels", row.device, row.engine.name)]
            now, moved = loss(best, of), False
            for factor in (1 + steps[name], 1 / (1 + steps[name])):
                tried = {**best, name: best[name] * factor}
                if (tried[name] > MOST and not name.endswith(("_s", "hops"))) or loss(tried, of) >= now:
                    continue
                best, moved = tried, True
                break
            steps[name] *= 1.2 if moved else 0.5
        say(f"# {loss(best, rows):.3f}")
    return best


def _weight(error: float) -> float:
    size = abs(error)
    return size**2 / (2 * LARGE) if size < LARGE else size - LARGE / 2


def constants_of(rows: Sequence[ServedRow]) -> dict[str, float]:
    """The present constants on which the rows depend."""
    constants: dict[str, float] = {}
    for engine in {row.engine.name: row.engine for row in rows}.values():
        constants |= {f"{engine.name}/{name}": value for name in HOST if (value := getattr(engine, name))}
        constants |= {f"kernels/{name}": getattr(engine.kernels, name) for name in KERNELS}
    for name in sorted({row.device for row in rows}):
        of = device_of(name)
        constants[f"{name}/reading"] = of.serving.efficiency.streaming
    return constants
