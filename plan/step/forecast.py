"""The forecast of a whole training run: days, device-hours, cost and energy, with failures and checkpoints.

Failures are random with a constant rate. A run saves every `interval` seconds, which takes `save_s`; a failure loses
the work since the last checkpoint and `restart_s`. J. T. Daly, "A higher order estimate of the optimum checkpoint
interval" (2006), gives the expected time (equation 20) and the best interval (equation 37). For rare failures that is
J. W. Young's square root of 2 x save_s x mean time between failures.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from tpshard.plan.step.units import count, seconds

DAY = 86400.0
UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
ASSUMED_FAILURES = 419 / (54 * 24 * 16384)
"""Failures per device-hour: 419 in 54 days on 16,384 H100, as published for Llama 3 405B (arXiv 2407.21783)."""
ASSUMED_RESTART_S = 600.0
"""Seconds from a failure to the next step, without recomputing lost steps."""
ASSUMED_WRITE = 2e9
"""Bytes per second at which a host writes a checkpoint."""


@dataclass(frozen=True)
class Conditions:
    """The tokens, prices and failure rates of a run that the command line sets; None where it does not."""

    tokens: float | None = None
    """Training tokens; None: the recipe's `train.steps`."""
    price: float | None = None
    """Price of a device-hour."""
    watts: float | None = None
    """Power of a device with its share of the host, in watts."""
    failures: float | None = None
    """Failures per device-hour."""
    restart_s: float | None = None
    save_s: float | None = None


@dataclass(frozen=True)
class Forecast:
    """The expected duration of a run with failures, and the figures it follows from."""

    steps: int
    tokens: float
    devices: int
    step_s: float
    provenance: str
    """The basis of `step_s`: calibrated or roofline."""
    between_failures_s: float
    """Mean time between failures in seconds; infinite without failures."""
    restart_s: float
    save_s: float
    every_steps: int
    """Steps between checkpoints in the recipe; 0: none."""
    price: float | None
    watts: float | None
    assumed: tuple[str, ...]
    """Which of failures, restart_s and save_s are assumed."""

    @property
    def work_s(self) -> float:
        """Seconds of the steps alone, at the planned speed."""
        return self.steps * self.step_s

    @property
    def best_every_steps(self) -> int:
        """Steps between checkpoints that minimize the duration."""
        if math.isinf(self.between_failures_s):
            return 0
        return max(1, min(self.steps, round(best_interval(self.save_s, self.between_failures_s) / self.step_s)))

    @property
    def total_s(self) -> float:
        """The expected duration with the recipe's checkpoints."""
        return self._total(self.every_steps)

    @property
    def best_total_s(self) -> float:
        """The expected duration with the best interval between checkpoints."""
        return self._total(self.best_every_steps)

    def _total(self, every: int) -> float:
        """The expected duration with a checkpoint every `every` steps; 0: none."""
        interval = (every or self.steps) * self.step_s
        save = self.save_s if every else 0.0
        return expected_seconds(self.work_s, interval, save, self.restart_s, self.between_failures_s)

    @property
    def goodput(self) -> float:
        """The share of the time spent in steps that are not lost."""
        return self.work_s / self.total_s

    @property
    def device_hours(self) -> float:
        """Devices x hours of the whole run."""
        return self.devices * self.total_s / 3600

    def to_json(self) -> dict[str, Any]:
        """All figures, with infinite ones as null."""
        derived = {
            "total_s": self.total_s, "work_s": self.work_s, "goodput": self.goodput, "device_hours": self.device_hours,
            "best_every_steps": self.best_every_steps, "best_goodput": self.work_s / self.best_total_s,
            "cost": None if self.price is None else self.price * self.device_hours,
            "kwh": None if self.watts is None else self.watts * self.device_hours / 1000,
        }  # fmt: skip
        figures = {**asdict(self), **derived}
        return {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in figures.items()}


def expected_seconds(work: float, interval: float, save: float, restart: float, between: float) -> float:
    """The expected duration of `work` seconds of steps with failures and a checkpoint every `interval` seconds.

    Source: Daly, equation 20.
    """
    if math.isinf(between):
        return work * (1 + save / interval)
    exponent = (interval + save) / between
    if exponent + restart / between > 500:
        return math.inf  # no interval ever completes
    return between * math.exp(restart / between) * math.expm1(exponent) * work / interval


def best_interval(save: float, between: float) -> float:
    """The seconds of steps between checkpoints that minimize the expected duration (Daly, equation 37)."""
    if save >= 2 * between:
        return between
    ratio = save / (2 * between)
    return max(math.sqrt(2 * save * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save, 1e-9)


def forecast(
    step_s: float, tokens_a_step: int, steps: int, devices: int, hosts: int, saved_bytes: float, every_steps: int,
    provenance: str, conditions: Conditions,
) -> Forecast:  # fmt: skip
    """The forecast of a run under its conditions; missing ones are assumed and listed."""
    if conditions.tokens is not None:
        steps = math.ceil(conditions.tokens / tokens_a_step)
    assumptions = {
        "failures": ASSUMED_FAILURES, "restart_s": ASSUMED_RESTART_S, "save_s": saved_bytes / hosts / ASSUMED_WRITE,
    }  # fmt: skip
    stated = {name: getattr(conditions, name) for name in assumptions}
    value = {name: assumptions[name] if stated[name] is None else stated[name] for name in assumptions}
    between = 3600 / (value["failures"] * devices) if value["failures"] else math.inf
    return Forecast(
        steps, float(steps) * tokens_a_step, devices, step_s, provenance, between, value["restart_s"], value["save_s"],
        every_steps, conditions.price, conditions.watts, tuple(name for name in assumptions if stated[name] is None),
    )  # fmt: skip


def amount(text: str) -> float:
    """The number of tokens in `15T`, `300B` or `1.5e12`. Raises ValueError."""
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[0-9]+)?([kMBT]?)", text.strip())
    tokens = float(match[1] + (match[2] or "")) * UNITS[match[3]] if match is not None else 0.0
    if not 0 < tokens < math.inf:
        raise ValueError(f"{text!r} is not a number of tokens; write 15T, 300B or 1.5e12")
    return tokens


def days(s: float) -> str:
    """Seconds as text, in days or hours."""
    if math.isinf(s):
        return "no end"
    return f"{s / DAY:,.1f} days" if s >= DAY else f"{s / 3600:.1f} h" if s >= 3600 else seconds(s)


def rows(run: Forecast) -> list[str]:
    """The forecast as lines of the screen."""
    label = ", ".join({"restart_s": "restart", "save_s": "save"}.get(name, name) for name in run.assumed)
    lines = [
        f"RUN  {count(run.tokens)} tokens = {run.steps:,} steps" + (f"   [assumed: {label}]" if label else ""),
        f"  {days(run.work_s)} of steps [{run.provenance}], {days(run.total_s)} with failures and checkpoints: "
        f"goodput {run.goodput:.3f}",
    ]
    costs = [f"{count(run.device_hours)} device-hours"]
    if run.price is not None:
        costs.append(f"{count(run.price * run.device_hours)} at {run.price:g} a device-hour")
    if run.watts is not None:
        costs.append(f"{run.watts * run.device_hours / 1e6:,.2f} MWh at {run.watts:g} W a device")
    lines.append("  " + ", ".join(costs))
    if math.isinf(run.between_failures_s):
        lines.append("  without failures")
        return lines
    saves = f"every {run.every_steps:,} steps ({days(run.every_steps * run.step_s)})" if run.every_steps else "never"
    lines.append(
        f"  a failure every {days(run.between_failures_s)}, {seconds(run.restart_s)} to restart; saved {saves}, "
        f"{seconds(run.save_s)} each"
    )
    if run.total_s > 1.005 * run.best_total_s:
        lines.append(
            f"  try: checkpoint.every_steps: {run.best_every_steps}: {days(run.best_total_s)}, goodput "
            f"{run.work_s / run.best_total_s:.3f}"
        )
    return lines
