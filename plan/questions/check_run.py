"""`plan --check RUN`: compares a run's folder with its plan, and names the constants of the device that look wrong.

Counted figures (collectives, bytes) are exact: a difference means that another program ran. Memory is exact where no
compiler allocates. Times depend on the device file's constants: where they are off by more than the run's own spread,
the constants behind them are named with their shares.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tpshard.devices.read import device as device_named
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.parallelism.pricing.cost import Device
from tpshard.plan import saved_plan
from tpshard.plan.outputs import CommandResult, answer
from tpshard.plan.questions import plan_error
from tpshard.plan.step.units import FORMS, count, seconds
from tpshard.recipes.reading import load as recipes

EXACT = 1e-6
"""Relative error up to which counted figures agree."""
MEMORY = 0.02
TIME = 0.1
"""Relative errors up to which memory and times agree."""
SHARE = 0.15
"""The least share of the computing time at which a kind of work is named."""
CONSTANTS = {
    "matmul": ("matmul", "constants.matmul of rates"), "attention": ("attention", "constants.attention"),
    "stream": ("streaming", "constants.streaming of memory_bandwidth"),
}  # fmt: skip
"""Kind of work -> (the share in `Device.efficiency`, what the device file calls it)."""


@dataclass(frozen=True)
class RunFigure:
    """One figure as the plan predicts it and as the run measured it."""

    figure: str
    planned: float
    measured: float
    error: float | None
    """planned / measured - 1."""
    verdict: str


@dataclass
class RunFinding:
    """The result of comparing a run with its plan."""

    run: str
    device: str
    rows: list[RunFigure]
    distrust: list[str] = field(default_factory=list)
    """Constants of the device file that may be wrong, the likeliest first, with their value and the one that would
    fit."""


def check(folder: Path) -> RunFinding:
    """Compares a run with the plan in its folder; without one, with a new plan of its recipe.

    Raises `Mistakes` (exit 3) if the run logged no step, or its folder has neither plan nor recipe.
    """
    plan = _plan(folder)
    comparison = plan_error.compare(folder, plan)
    if comparison is None:
        raise Mistakes.one(
            f"{folder} has no steps to compare with a plan", why="metrics.jsonl has no row with a loss",
            fix="the folder of a run, as `tpshard train` leaves it",
        )  # fmt: skip
    spread = plan_error.spread(folder)
    rows = [_compare_figure(name, row, spread) for name, row in comparison.items()]
    finding = RunFinding(str(folder), plan["device"]["name"], rows)
    own = None
    with contextlib.suppress(Mistakes):
        own = _device(folder)
    finding.distrust = _suspects({row.figure: row for row in rows}, plan, own, spread)
    return finding


def answered(folder: Path, as_json: bool = False) -> CommandResult:
    """The answer of `--check`. Raises `Mistakes` where the run or the plan is missing."""
    finding = check(folder)
    return answer(as_json, asdict(finding), text(finding))


def _plan(folder: Path) -> Any:
    """The report in `plan.json` of a run's folder; without the file, a new one of the run's recipe."""
    if (folder / "plan.json").is_file():
        return saved_plan.read(str(folder / "plan.json")).printed
    from tpshard.plan import planner  # imports torch

    return json.loads(json.dumps(planner.report(recipes.load(folder), str(folder)).to_json()))


def _device(folder: Path) -> Device:
    cluster = recipes.load(folder).cluster
    return device_named(cluster.device if cluster is not None else plan_error.SHIPPED_CPU)


def _compare_figure(name: str, row: dict[str, Any], spread: float) -> RunFigure:
    error = row["error"]
    size = abs(error) if error is not None else float(row["predicted"] != row["measured"])
    if name in ("collectives", "sent_bytes"):
        verdict = "exact" if size <= EXACT else "wrong: another program ran than was planned"
    elif name == "peak_memory_bytes":
        verdict = "as planned" if size <= MEMORY else "off"
    elif size <= TIME:
        verdict = "as planned"
    else:
        verdict = "within the run's own spread" if name != "exposed_comm_s" and size <= spread else "off"
    return RunFigure(name, row["predicted"], row["measured"], error, verdict)


def _suspects(rows: dict[str, RunFigure], plan: Any, device: Device | None, spread: float) -> list[str]:
    """Names the constants of the device file that could explain the figures which differ from the plan."""
    step, exposed, peak = (rows.get(name) for name in ("step_s", "exposed_comm_s", "peak_memory_bytes"))
    constants: list[str] = []
    if step is not None and exposed is not None:
        constants += _computing(step.measured - exposed.measured, exposed.planned, plan, device, spread)
    elif step is not None and step.verdict == "off":  # exposed time was not measured: assume the plan's
        waited = plan["time"]["exposed_comm_s"]
        constants += _computing(step.measured - waited, waited, plan, device, spread)
    if exposed is not None and exposed.verdict == "off" and step is not None:
        off = abs(exposed.planned - exposed.measured) / step.measured
        if off > TIME / 2:
            constants += _links(exposed, plan)
    if peak is not None and peak.verdict == "off":
        constants.append("memory: no constant; what a compiler or allocator does, or another program than was planned")
    return constants


def _computing(measured: float, waited: float, plan: Any, device: Device | None, spread: float) -> list[str]:
    """Names the constants behind the computing time, if it differs from the plan by more than the run's spread."""
    planned = plan["time"]["step_s"] - waited
    if measured <= 0 or abs(planned / measured - 1) <= max(TIME, spread):
        return []
    work = plan["time"]["by_work"]
    host = max(0.0, planned - sum(work.values()))
    shares = {**work, "host": host}
    ratio = measured / planned
    lines = []
    for kind, work_s in sorted(shares.items(), key=lambda item: -item[1]):
        if work_s < SHARE * planned:
            continue
        name, words = CONSTANTS.get(kind, ("", "constants.step, and of a CPU the memory it maps anew"))
        line = f"{words}: {100 * work_s / planned:.0f}% of the computing time, which took {ratio:.2f} times the plan"
        alone = 1 + (measured - planned) / work_s  # how much longer this kind took if the others took as planned
        was = getattr(device.efficiency, name) if device is not None and name else 1.0
        if name and was < alone:  # a share of a rate is at most 1
            line += f"; {was:.3g} would be {was / alone:.3g} if it alone is wrong"
        lines.append(line)
    return lines


def _links(exposed: RunFigure, plan: Any) -> list[str]:
    """Names the links that carry a large share of the collectives' time."""
    times: dict[str, float] = {}
    for line in plan["collectives"]:
        times[line["link"]] = times.get(line["link"], 0.0) + line["time_s"]
    whole = sum(times.values())
    return [
        f"{link}: bandwidth, efficiency and latency of the link; {100 * link_s / whole:.0f}% of the collectives' time; "
        f"{seconds(exposed.measured)} was waited for, planned {seconds(exposed.planned)}"
        for link, link_s in sorted(times.items(), key=lambda item: -item[1])
        if link != "none" and link_s >= SHARE * whole
    ]


def text(finding: RunFinding) -> str:
    """The comparison as text."""
    lines = [
        f"{finding.run} against its plan for {finding.device}",
        f"  {'':<20}{'planned':>12}{'measured':>12}{'error':>8}",
    ]
    for row in finding.rows:
        form = FORMS.get(row.figure, count)
        error = "" if row.error is None else f"{100 * row.error:+.1f}%"
        lines.append(f"  {row.figure:<20}{form(row.planned):>12}{form(row.measured):>12}{error:>8}  {row.verdict}")
    if not finding.distrust:
        return "\n".join([*lines, "no constant of the device is to be distrusted"]) + "\n"
    lines.append("to distrust, the likeliest first (`tpshard doctor --measure` fits them on this machine)")
    return "\n".join([*lines, *(f"  {line}" for line in finding.distrust)]) + "\n"
