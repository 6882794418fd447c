"""The data behind a plan's page: reasons of shardings and collectives, and timeline events."""

from __future__ import annotations

from typing import Any

from tpshard.plan.report.drawing import Drawing
from tpshard.plan.report.pattern import pattern
from tpshard.plan.step.figures import DrawnPart
from tpshard.plan.views.pictures import COLORS, tint

FINEST = 20_000
"""Resolution of a timeline; closer neighbours of one colour are one event."""


def data(drawing: Drawing) -> dict[str, Any]:
    """All data of the page: tensors, collectives and timelines."""
    return {**drawing.causes, "timelines": [timeline(part) for part in drawing.parts]}


def timeline(part: DrawnPart) -> dict[str, Any]:
    """The events of each lane as [start, length, colour, words], in units of `seconds` / `FINEST`."""
    total = part.drawn_s
    colors: dict[str, int] = {}
    descriptions: dict[str, int] = {}
    events: dict[str, list[list[int]]] = {lane: [] for lane in part.lanes}
    for event in part.events:
        op = part.ops[event.op]
        name = pattern(op.module or op.origin or event.name)
        if op.kind:
            name = f"{op.kind} of {pattern(op.value)}" if op.value else op.kind
        color = colors.setdefault(COLORS.get(tint(event.lane, op), "#888888"), len(colors))
        start, end = round(event.start / total * FINEST), round(event.end / total * FINEST)
        before = events[event.lane][-1] if events[event.lane] else None
        short = before is not None and end - start <= 1 and before[1] <= 1
        if before is not None and short and before[2] == color and start - before[0] - before[1] <= 0:
            before[1] = end - before[0]
            continue
        events[event.lane].append(
            [start, end - start, color, descriptions.setdefault(f"{name} ({op.phase})", len(descriptions))]
        )
    return {
        "seconds": total, "finest": FINEST, "colors": list(colors), "words": list(descriptions),
        "lanes": events, "order": list(part.lanes),
    }  # fmt: skip
