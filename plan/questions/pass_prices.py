"""The effect of each pass on a training step: collectives, peak memory and time before and after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tpshard.plan.planner import without_gc
from tpshard.plan.step.step_price import price_training
from tpshard.plan.step.units import gib, round_figures, seconds
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.programs.step.staged import between_passes
from tpshard.programs.step.training_step import TrainingPrograms


@dataclass(frozen=True)
class Row:
    """The price of a step after one pass."""

    name: str
    """The pass's name; "" for the program before the first pass."""
    settings: dict[str, Any]
    pass_s: float
    """Seconds that the pass itself took on this machine."""
    collectives: int
    """Collectives of a step."""
    collective_bytes: int
    peak_bytes: int
    step_s: float
    exposed_s: float


def rows(setting: Setting) -> list[Row]:
    """Prices a training step before its first pass and after every pass, a row each.

    In a pipeline, rows after the cut into stages count the collectives of the slowest device. Raises `Mistakes` where
    the parts of the recipe do not fit each other.
    """
    priced_rows: list[Row] = []

    def watch(programs: TrainingPrograms, name: str, settings: dict[str, Any], pass_s: float) -> None:
        pricing = price_training(programs)
        lines = pricing.lines()
        priced_rows.append(
            Row(
                name, _plain(settings), pass_s, sum(line.count for line in lines),
                sum(line.bytes for line in lines), pricing.peak_bytes, pricing.step_s, pricing.exposed_s,
            )
        )  # fmt: skip

    with without_gc():
        step = training.build(setting, lambda programs, p: watch(programs, p.name, p.settings, p.seconds))
        if step.pipeline is not None:
            for name, pass_s, programs in between_passes(step):
                watch(programs, name, {}, pass_s)
    return priced_rows


def to_json(table: list[Row]) -> dict[str, Any]:
    return {"passes": [round_figures(asdict(row)) for row in table]}


def text(priced_rows: list[Row]) -> str:
    """The rows as a table; a dot stands for an unchanged figure."""
    table: list[tuple[str, ...]] = [("PASSES of a step", "took", "collectives", "bytes", "peak", "step", "exposed")]
    before: tuple[str, ...] = ("",) * 5
    for row in priced_rows:
        settings = ", ".join(f"{k} {v}" for k, v in row.settings.items())
        name = row.name + (f" ({settings})" if settings else "")
        cells = (
            str(row.collectives), gib(row.collective_bytes), gib(row.peak_bytes), seconds(row.step_s),
            seconds(row.exposed_s),
        )  # fmt: skip
        shown = ("." if now == then else now for now, then in zip(cells, before))
        table.append((name or "as partitioned", seconds(row.pass_s) if row.name else "", *shown))
        before = cells
    wide = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = (
        "  ".join([row[0].ljust(wide[0]), *(cell.rjust(n) for cell, n in zip(row[1:], wide[1:]))]) for row in table
    )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a pass as plain values for JSON: a sequence becomes its length, a function its name."""

    def plain(value: Any) -> Any:
        if isinstance(value, (bool, int, float, str)):
            return value
        return len(value) if isinstance(value, (tuple, list)) else value.__qualname__.partition(".")[0]

    return {key: plain(value) for key, value in settings.items()}
