"""Fits the constants of engines and kernels on published servers, for `serving_accuracy.py --fit`.

Each figure's error counts as a logarithm, large ones by their size and not by its square: some rows are wrong. A
constant is drawn to the value that it has, so that those that no row tells apart stay. What a device reads at stays as
its file has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from published_servers import Constants, ServedRow, device_of

HOST = ("host_s", "row_s", "peers_s", "request_s", "launch_s", "narrow")
KERNELS = ("cache", "gap_s", "unpacked", "converted", "experts", "attention", "hops", "uneven")
SHARES = ("cache", "unpacked", "converted", "experts", "attention", "narrow")
DRAWN = 0.15
"""How much a constant's distance from its present value counts, as the square of a logarithm."""
LARGE = 0.15
"""The error above which errors count by their size."""
MOST = 0.95
"""The largest share."""
PROBE, STRIDE, SOLVED = 0.05, 0.5, 30
"""By how much a constant is changed to see what it does, by how much a round moves it at most, both as logarithms; and
how often a round weighs the errors anew."""


class Errors(Protocol):
    """What a fit reads of an outcome."""

    @property
    def errors(self) -> dict[str, float]: ...


def fit(
    rows: Sequence[ServedRow], outcome_of: Callable[[ServedRow, Constants], Errors], rounds: int,
    say: Callable[[str], None],
) -> dict[str, float]:  # fmt: skip
    """The constants with which the rows' errors are least: in each round a step of Gauss and Newton, from what a small
    change of each constant does to each error."""
    own = {name: value for name, value in constants_of(rows).items() if not name.endswith("/reading")}
    best, names = dict(own), list(own)

    def errors_of(row: ServedRow, constants: Constants) -> dict[str, float]:
        errors = outcome_of(row, constants).errors
        return {name: math.log1p(error) for name, error in errors.items() if "above" not in name}

    for _ in range(rounds):
        errors, slopes = list[float](), list[list[float]]()
        for row in rows:
            here = errors_of(row, best)
            moved = {
                name: errors_of(row, {**best, name: best[name] * math.exp(PROBE)})
                for name in names if name.partition("/")[0] in ("kernels", row.engine.name)
            }  # fmt: skip
            errors += here.values()
            slopes += [
                [(moved[name].get(of, error) - error) / PROBE if name in moved else 0.0 for name in names]
                for of, error in here.items()
            ]
        distance = np.array([math.log(best[name] / own[name]) for name in names])
        say(f"# {sum(map(_weight, errors)) + DRAWN * float(distance @ distance):.3f}")
        step = np.clip(_least(np.array(errors), np.array(slopes), distance), -STRIDE, STRIDE)
        for name, by in zip(names, step):
            best[name] *= math.exp(by)
            if name.partition("/")[2] in SHARES:
                best[name] = min(best[name], MOST)
    return best


def _least(errors: np.ndarray, slopes: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """The step [constants] after which errors [figures] that grow by `slopes` [figures, constants] are least."""
    step = np.zeros(len(distance))
    for _ in range(SOLVED):
        weights = 1 / np.maximum(np.abs(errors + slopes @ step), LARGE)
        curve = slopes.T @ (weights[:, None] * slopes) + 2 * DRAWN * np.eye(len(step))
        step = -np.linalg.solve(curve, slopes.T @ (weights * errors) + 2 * DRAWN * distance)
    return step


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
