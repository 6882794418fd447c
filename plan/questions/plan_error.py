"""Compares a plan with its run, from the files plan.json and metrics.jsonl of the run's folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

from tpshard.plan import saved_plan
from tpshard.plan.step.units import FORMS

SHIPPED_CPU = "cpu"
"""The name of the device file that stands for any CPU."""
TIMES = ("step_s", "exposed_comm_s", "tokens_per_s")
"""The figures that depend on the device file's rates."""
SKIPPED = 2
"""Logged steps of warm-up, left out of the comparison where there are enough others."""


def compare(folder: Path, plan: Any = None) -> dict[str, Any] | None:
    """Compares a run with its plan: {figure: {predicted, measured, error}}; None without a plan or a logged step.

    A run's metrics are those of rank 0; its collectives, bytes and memory are compared with the plan's of that rank.
    Measured is the median over the training rows of the last attempt; of a step logged twice the last row counts.
    `plan` defaults to the one in the folder.
    """
    try:
        plan = plan or saved_plan.read(str(folder / "plan.json")).printed
        rows = measured_rows(folder)
    except Exception:  # a run without a plan, or one that is being written: there is nothing to compare
        return None
    if not rows:
        return None
    predicted = {
        "step_s": plan["time"]["step_s"],
        **_of_first_rank(plan),
        "tokens_per_s": plan["tokens_per_s_per_device"] * math.prod(plan["mesh"].values()),
    }
    comparison: dict[str, Any] = {}
    for name, value in predicted.items():
        measured = [float(row[name]) for row in rows if row.get(name) is not None]
        if measured:
            middle = median(measured)
            comparison[name] = {"predicted": value, "measured": middle, "error": value / middle - 1 if middle else None}
    return comparison or None


def measured_rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics of the last attempt's training steps, without its first steps, which warm up."""
    rows: dict[int, dict[str, Any]] = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed
        if isinstance(row, dict) and row.get("loss") is not None and "step" in row:
            rows[int(row["step"])] = row
    last = max((row.get("run") or 0 for row in rows.values()), default=None)
    of_attempt = [row for _, row in sorted(rows.items()) if (row.get("run") or 0) == last]
    return of_attempt[SKIPPED:] if len(of_attempt) > SKIPPED + 2 else of_attempt[1:] or of_attempt


def spread(folder: Path) -> float:
    """The variation of a run's step time: the range of its middle half, as a share of the median."""
    times = sorted(float(row["step_s"]) for row in measured_rows(folder) if row.get("step_s"))
    if len(times) < 4:
        return 0.0
    return (times[3 * len(times) // 4] - times[len(times) // 4]) / times[len(times) // 2]


def record(folder: Path) -> str:
    """Writes the comparison to `plan_measured.json` beside the plan, and returns it as a line; "" if there is none.

    The line leaves out times that were planned with the shipped file of a CPU (`tpshard doctor --measure` writes this
    machine's)."""
    comparison = compare(folder)
    if comparison is None:
        return ""
    plan = saved_plan.read(str(folder / "plan.json")).printed
    saved_plan.write(folder / "plan_measured.json", json.dumps(comparison, indent=1, sort_keys=True) + "\n")
    parts = []
    foreign = plan["device"]["name"] == SHIPPED_CPU  # it stands for any CPU: its times are of another machine
    for name, row in comparison.items():
        if foreign and name in TIMES:
            continue
        form = FORMS.get(name, lambda v: f"{v:.0f}")
        error = "" if row["error"] is None else f" ({100 * row['error']:+.0f}%)"
        parts.append(f"{name} {form(row['predicted'])} against {form(row['measured'])}{error}")
    return "planned against measured: " + ", ".join(parts) if parts else ""


def _of_first_rank(plan: Any) -> dict[str, float]:
    """The plan's waiting, counts and memory of rank 0, which in a pipeline is a device of the first stage.

    There it also waits for other stages.
    """
    if devices := (plan.get("pipeline") or {}).get("by_device"):
        first = devices[0]
        waited = plan["pipeline"]["seconds"] - first["busy_s"]
        peak, count, sent = first["peak_bytes"], first["collectives"], first["sent_bytes"]
    else:
        lines, waited = plan["collectives"], plan["time"]["exposed_comm_s"]
        peak, count = plan["memory"]["peak_bytes"], sum(line["count"] for line in lines)
        sent = sum(line["wire_bytes"] for line in lines)
    return {"exposed_comm_s": waited, "peak_memory_bytes": peak, "collectives": count, "sent_bytes": sent}
