"""A plan as a Chrome trace (chrome://tracing, Perfetto): a lane per resource, and memory as counters."""

from __future__ import annotations

import json
from typing import Any

from tpshard.plan.report.drawing import Drawing
from tpshard.plan.report.report import Report
from tpshard.plan.views.stage_lanes import stage_lanes


def trace(report: Report, drawing: Drawing) -> str:
    """The plan as JSON in the trace-event format, with times in microseconds.

    The parts of a step follow each other, each once. A pipeline's schedule is shown for the whole step.
    """
    events: list[dict[str, Any]] = []
    order: dict[str, int] = {}
    for part in drawing.parts:
        for lane in part.lanes:
            order.setdefault(lane, len(order))
    for lane, tid in order.items():
        title = lane if lane in ("compute", "wait") else f"collectives over {lane}"
        events.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": title}})
        events.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    offset = 0.0
    for part in drawing.parts:
        for event in part.events:
            op = part.ops[event.op]
            args: dict[str, Any] = {"module": op.module, "phase": op.phase, "part": part.name}
            if op.kind:
                args |= {"kind": op.kind, "bytes": op.bytes, "reason": op.reason}
            elif op.flops:
                args["flops"] = op.flops
            events.append(
                {
                    "ph": "X", "pid": 0, "tid": order[event.lane], "name": op.origin or event.name,
                    "cat": op.phase, "ts": _us(offset + event.start), "dur": _us(event.end - event.start),
                    "args": args,
                }
            )  # fmt: skip
        last: dict[str, int] = {}
        for i, at in enumerate(part.at):
            held = {name: series[i] for name, series in part.curves.items()}
            if held != last:
                events.append(
                    {
                        "ph": "C",
                        "pid": 0,
                        "name": "memory (bytes)",
                        "ts": _us(offset + at),
                        "args": dict(sorted(held.items())),
                    }
                )
                last = held
        offset += part.each_s
    events += _stages(report, drawing)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, indent=None, separators=(",", ":")) + "\n"


def _stages(report: Report, drawing: Drawing) -> list[dict[str, Any]]:
    """A lane per device of a pipeline, with the tasks of its schedule."""
    pipeline = stage_lanes(report, drawing)
    if pipeline is None:
        return []
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"pipeline, {pipeline.table.schedule}"}}
    ]
    for device in range(pipeline.table.devices):
        named = {"name": f"device {device} along pp"}
        events.append({"ph": "M", "pid": 1, "tid": device, "name": "thread_name", "args": named})
    for task, start, end in pipeline.slots:
        events.append(
            {
                "ph": "X", "pid": 1, "tid": pipeline.table.device_of(task.stage), "name": str(task), "cat": task.kind,
                "ts": _us(start), "dur": _us(end - start), "args": {"stage": task.stage, "micro_batch": task.micro},
            }
        )  # fmt: skip
    return events


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
