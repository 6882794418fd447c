"""Profiled steps as a trace, and their largest differences from the plan. See `parallelism.runtime.step_profile`."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpshard.files.atomic import write_file
from tpshard.parallelism.runtime.step_profile import OperationEvent

LARGEST = 10
"""Rows of the table."""


def trace_of(events: Sequence[OperationEvent]) -> dict[str, Any]:
    """The events in the trace-event format, as `plan --trace` writes a plan: a lane per resource, microseconds."""
    names = {event.lane for event in events}
    lanes = [lane for lane in ("compute", "wait") if lane in names] + sorted(names - {"compute", "wait"})
    rows: list[dict[str, Any]] = []
    for tid, lane in enumerate(lanes):
        title = lane if lane in ("compute", "wait") else f"collectives over {lane}"
        rows.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": title}})
        rows.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    zero = min((event.start for event in events), default=0.0)
    for event in sorted(events, key=lambda event: event.start):
        about: dict[str, Any] = {"module": event.module, "phase": event.phase, "part": event.part}
        if event.comm is not None:
            about |= {"kind": event.comm.kind, "bytes": event.comm.bytes, "reason": event.comm.reason}
        elif event.flops:
            about["flops"] = event.flops
        rows.append(
            {
                "ph": "X", "pid": 0, "tid": lanes.index(event.lane), "name": event.name, "cat": event.phase,
                "ts": round((event.start - zero) * 1e6, 3), "dur": round((event.end - event.start) * 1e6, 3),
                "args": about,
            }
        )  # fmt: skip
    return {"displayTimeUnit": "ms", "traceEvents": rows}


def differences(
    planned: Mapping[str, Any], measured: Mapping[str, Any], runs: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The kinds of work that differ most between two traces, largest first: name, planned_s, measured_s.

    Work of one kind is what a layer's module computes in a phase, or a collective of one kind over the same axes for
    it; layers count together. runs: how often each part ran in the measured trace; a planned trace has each once.
    """
    before, after = _by_kind(planned, {}), _by_kind(measured, runs)
    rows: list[dict[str, Any]] = [
        {"name": name, "planned_s": before.get(name, 0.0), "measured_s": after.get(name, 0.0)}
        for name in dict.fromkeys((*before, *after))
    ]
    return sorted(rows, key=lambda row: -abs(row["measured_s"] - row["planned_s"]))[:LARGEST]


def _by_kind(trace: Mapping[str, Any], runs: Mapping[str, int]) -> dict[str, float]:
    """Seconds of one run of each part, by kind of work."""
    titles = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name" and event["pid"] == 0
    }
    seconds: dict[str, float] = defaultdict(float)
    for event in trace["traceEvents"]:
        if event["ph"] != "X" or event["pid"] != 0 or titles[event["tid"]] == "wait":
            continue
        about = event["args"]
        module = re.sub(r"\.\d+(?=\.|$)", ".*", about["module"]) or "the step"
        work = (
            f"{about['kind']} {titles[event['tid']].removeprefix('collectives ')}" if "kind" in about else "computing"
        )
        name = f"{about['part']}: {module}, {about['phase'] or 'update'}, {work}"
        seconds[name] += event["dur"] / 1e6 / max(1, runs.get(about["part"], 1))
    return dict(seconds)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The differences as text."""
    lines = [f"{'planned':>10}  {'measured':>10}  {'difference':>10}  of one run of each part, in milliseconds"]
    for row in rows:
        planned, measured = row["planned_s"] * 1e3, row["measured_s"] * 1e3
        lines.append(f"{planned:>10.3f}  {measured:>10.3f}  {measured - planned:>+10.3f}  {row['name']}")
    return "\n".join(lines)


def write(
    folder: Path, steps: Sequence[int], events: Sequence[OperationEvent], runs: Mapping[str, int], planned: str
) -> str:
    """Writes the trace, the planned one and the table to `folder`/profile; returns the table with their places.

    OSError where they cannot be written.
    """
    place, measured = folder / "profile", trace_of(events)
    place.mkdir(parents=True, exist_ok=True)
    name = f"steps-{steps[0]}-{steps[1]}"
    write_file(place / f"{name}.trace.json", json.dumps(measured, separators=(",", ":")) + "\n")
    lines = [f"trace of the steps {steps[0]} to {steps[1]}: {place / name}.trace.json"]
    if planned:
        write_file(place / "planned.trace.json", planned)
        rows = differences(json.loads(planned), measured, runs)
        write_file(place / f"{name}.differences.json", json.dumps(rows, indent=1) + "\n")
        lines += [f"the planned one: {place}/planned.trace.json; the largest differences:", table(rows)]
    return "\n".join(lines)
