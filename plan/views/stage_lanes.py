"""The schedule of a plan's pipeline as lanes, for pictures and traces: a lane per device, a slot per task."""

from __future__ import annotations

from dataclasses import dataclass

from tpshard.parallelism.pipeline.schedules import Slot, Table
from tpshard.plan.report.drawing import Drawing
from tpshard.plan.report.report import Report
from tpshard.plan.report.screen_words import pipeline_words
from tpshard.plan.step.figures import DrawnPart
from tpshard.plan.step.units import seconds
from tpshard.programs.setting.stacking import Stacking


@dataclass(frozen=True)
class StageLanes:
    """The tasks of a pipeline with their start and end times, a lane per device."""

    table: Table
    slots: list[Slot]
    seconds: float
    """Seconds that the lanes cover."""
    words: str


def stage_lanes(report: Report, drawing: Drawing) -> StageLanes | None:
    """The lanes of a staged or a vectorized pipeline; None without a pipeline.

    The steps of a vectorized pipeline are drawn equally long: forward and backward pass of the layers divided by the
    number of steps. In its gaps devices compute too, but nothing reads the results.
    """
    piped = report.pricing.pipeline
    if piped is not None:
        words = f"{piped.table.schedule}: {100 * piped.bubble:.1f}% bubble, {seconds(piped.seconds)}"
        return StageLanes(piped.table, list(piped.slots), piped.seconds, words)
    how = report.job.stacking
    if how is None:
        return None
    for part in drawing.parts:
        spans = [_span(part, how.path, phases) for phases in (("forward",), ("backward", "recompute"))]
        if all(end > start for start, end in spans):
            words = f"{pipeline_words(report)}, {seconds(part.each_s)}"
            return StageLanes(how.table, _slots(how, *spans), part.each_s, words)
    return None


def _span(part: DrawnPart, path: str, phases: tuple[str, ...]) -> tuple[float, float]:
    """(start of the first, end of the last event) of the layers in the list `path`, in seconds; (0, 0) if none."""
    ops = ((event, part.ops[event.op]) for event in part.events)
    own = [event for event, op in ops if op.phase in phases and f"{op.module}.".startswith(f"{path}.")]
    return min((e.start for e in own), default=0.0), max((e.end for e in own), default=0.0)


def _slots(how: Stacking, forward: tuple[float, float], backward: tuple[float, float]) -> list[Slot]:
    """A slot per task: all stages of a step at the same time, backward steps in reverse order."""
    each, back = ((end - start) / how.steps for start, end in (forward, backward))
    slots = []
    for time, _, task in how.tasks():
        start, mirrored = forward[0] + time * each, backward[0] + (how.steps - 1 - time) * back
        slots += [Slot(task, start, start + each), Slot(task._replace(kind="B"), mirrored, mirrored + back)]
    return sorted(slots, key=lambda slot: (slot.start, slot.task.stage))
