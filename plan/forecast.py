"""What a whole training run takes: days, device-hours, cost and energy, with failures and checkpoints.

Failures come at random at a constant rate. A run that saves every `interval` seconds, each taking `save_s`, loses on a
failure what it did since, and `restart_s`; J. T. Daly, "A higher order estimate of the optimum checkpoint interval"
(2006), gives the expected time (equation 20) and the best interval (equation 37), which for rare failures is J. W.
Young's square root of 2 x save_s x mean time between failures.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from tpshard.plan.units import count, seconds

DAY = 86400.0
UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
ASSUMED_FAILURES = 419 / (54 * 24 * 16384)
"""Failures of a device in an hour: 419 in 54 days on 16,384 H100, as published for Llama 3 405B (arXiv 2407.21783)."""
ASSUMED_RESTART_S = 600.0
"""From a failure to the first step after it, without the work that is done again."""
ASSUMED_WRITE = 2e9
"""Bytes a second at which a host writes a checkpoint."""


@dataclass(frozen=True)
class Conditions:
    """What the command line says of the run's surroundings; None where it says nothing."""

    tokens: float | None = None
    """To train on; None: the recipe's `train.steps`."""
    price: float | None = None
    """Of a device for an hour."""
    watts: float | None = None
    """That a device draws, with its share of the host."""
    failures: float | None = None
    """Of a device in an hour."""
    restart_s: float | None = None
    save_s: float | None = None


@dataclass(frozen=True)
class Forecast:
    """A run's length. Times in seconds."""

    steps: int
    tokens: float
    devices: int
    step_s: float
    provenance: str
    """Of `step_s`: calibrated or roofline."""
    between_failures_s: float
    """Mean time; infinite without failures."""
    restart_s: float
    save_s: float
    every_steps: int
    """Steps between checkpoints, as the recipe says; 0: none."""
    price: float | None
    watts: float | None
    assumed: tuple[str, ...]
    """Which of failures, restart_s and save_s nobody gave."""

    @property
    def work_s(self) -> float:
        """Steps alone, at the planned speed."""
        return self.steps * self.step_s

    @property
    def best_every_steps(self) -> int:
        """Steps between checkpoints that make the run shortest."""
        if math.isinf(self.between_failures_s):
            return 0
        return max(1, min(self.steps, round(best_interval(self.save_s, self.between_failures_s) / self.step_s)))

    @property
    def total_s(self) -> float:
        return self._total(self.every_steps)

    @property
    def best_total_s(self) -> float:
        return self._total(self.best_every_steps)

    def _total(self, every: int) -> float:
        interval = (every or self.steps) * self.step_s
        save = self.save_s if every else 0.0
        return expected_seconds(self.work_s, interval, save, self.restart_s, self.between_failures_s)

    @property
    def goodput(self) -> float:
        """Share of the time that goes into steps which are kept."""
        return self.work_s / self.total_s

    @property
    def device_hours(self) -> float:
        return self.devices * self.total_s / 3600

    def to_json(self) -> dict[str, Any]:
        """All figures, with infinite ones as null."""
        made = {
            "total_s": self.total_s, "work_s": self.work_s, "goodput": self.goodput, "device_hours": self.device_hours,
            "best_every_steps": self.best_every_steps, "best_goodput": self.work_s / self.best_total_s,
            "cost": None if self.price is None else self.price * self.device_hours,
            "kwh": None if self.watts is None else self.watts * self.device_hours / 1000,
        }  # fmt: skip
        known = {**asdict(self), **made}
        return {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in known.items()}


def expected_seconds(work: float, interval: float, save: float, restart: float, between: float) -> float:
    """Daly (20): the expected time of `work` seconds of steps, saved every `interval` seconds."""
    if math.isinf(between):
        return work * (1 + save / interval)
    exponent = (interval + save) / between
    if exponent + restart / between > 500:
        return math.inf  # no interval is ever finished
    return between * math.exp(restart / between) * math.expm1(exponent) * work / interval


def best_interval(save: float, between: float) -> float:
    """Daly (37): seconds of steps between checkpoints that make the expected time least."""
    if save >= 2 * between:
        return between
    ratio = save / (2 * between)
    return max(math.sqrt(2 * save * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save, 1e-9)


def forecast(
    step_s: float, tokens_a_step: int, steps: int, devices: int, hosts: int, saved_bytes: float, every_steps: int,
    provenance: str, conditions: Conditions,
) -> Forecast:  # fmt: skip
    """The run under its conditions; what they leave out is assumed, and said to be."""
    if conditions.tokens is not None:
        steps = math.ceil(conditions.tokens / tokens_a_step)
    assumptions = {
        "failures": ASSUMED_FAILURES, "restart_s": ASSUMED_RESTART_S, "save_s": saved_bytes / hosts / ASSUMED_WRITE,
    }  # fmt: skip
    given = {name: getattr(conditions, name) for name in assumptions}
    value = {name: assumptions[name] if given[name] is None else given[name] for name in assumptions}
    between = 3600 / (value["failures"] * devices) if value["failures"] else math.inf
    return Forecast(
        steps, float(steps) * tokens_a_step, devices, step_s, provenance, between, value["restart_s"], value["save_s"],
        every_steps, conditions.price, conditions.watts, tuple(name for name in assumptions if given[name] is None),
    )  # fmt: skip


def amount(text: str) -> float:
    """`15T`, `300B`, `1.5e12` -> a number of tokens. Raises ValueError."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([kMBT]?)", text.strip())
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is not a number of tokens; write 15T, 300B or 1.5e12")
    return float(found[1]) * UNITS[found[2]]


def days(s: float) -> str:
    """Seconds as days or hours."""
    if math.isinf(s):
        return "no end"
    return f"{s / DAY:,.1f} days" if s >= DAY else f"{s / 3600:.1f} h" if s >= 3600 else seconds(s)


def rows(made: Forecast) -> list[str]:
    """The forecast's part of the screen."""
    label = ", ".join({"restart_s": "restart", "save_s": "save"}.get(name, name) for name in made.assumed)
    lines = [
        f"RUN  {count(made.tokens)} tokens = {made.steps:,} steps" + (f"   [assumed: {label}]" if label else ""),
        f"  {days(made.work_s)} of steps [{made.provenance}], {days(made.total_s)} with failures and checkpoints: "
        f"goodput {made.goodput:.3f}",
    ]
    costs = [f"{count(made.device_hours)} device-hours"]
    if made.price is not None:
        costs.append(f"{count(made.price * made.device_hours)} at {made.price:g} a device-hour")
    if made.watts is not None:
        costs.append(f"{made.watts * made.device_hours / 1e6:,.2f} MWh at {made.watts:g} W a device")
    lines.append("  " + ", ".join(costs))
    if math.isinf(made.between_failures_s):
        lines.append("  without failures")
        return lines
    kept = f"every {made.every_steps:,} steps ({days(made.every_steps * made.step_s)})" if made.every_steps else "never"
    lines.append(
        f"  a failure every {days(made.between_failures_s)}, {seconds(made.restart_s)} to restart; saved {kept}, "
        f"{seconds(made.save_s)} each"
    )
    if made.total_s > 1.005 * made.best_total_s:
        lines.append(
            f"  try: checkpoint.every_steps: {made.best_every_steps}: {days(made.best_total_s)}, goodput "
            f"{made.work_s / made.best_total_s:.3f}"
        )
    return lines
