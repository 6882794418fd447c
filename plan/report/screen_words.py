"""Words of a plan that its screen, its page and its comparisons share."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from tpshard.parallelism.sharding import notation
from tpshard.parallelism.words import axes_text
from tpshard.plan.report.pattern import pattern
from tpshard.plan.step.units import gib, seconds

if TYPE_CHECKING:
    from tpshard.plan.report.report import Report

WIDTH, HEIGHT, NARROW = 100, 60, 80
LABELS = {
    "parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state",
    "activations": "activations", "gathered": "gathered buckets", "logits_and_loss": "logits and loss",
    "communication": "communication", "cache": "key-value cache", "temporary": "temporary",
}  # fmt: skip


def sharding_text(sharding: Sequence[Any], dims: Sequence[str] = ()) -> str:
    """A sharding in the notation of the docs, such as `[M_tp, E]`: each dim's letter with the axes that shard it."""

    def axes(dim: Any) -> str:
        alone = isinstance(dim, str) or (dim is not None and len(dim) == 3 and isinstance(dim[1], int))
        return axes_text([dim] if alone else dim or ())

    return notation([axes(dim) for dim in sharding], names=dims)


def cut(text: str, width: int = WIDTH) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def wrap(lines: Iterable[str], width: int = WIDTH) -> list[str]:
    """Breaks long lines at spaces; what follows a break is indented by two columns more, or by four at least."""
    broken: list[str] = []
    for line in lines:
        indent = " " * max(4, len(line) - len(line.lstrip()) + 2)
        broken += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [line]
    return broken


def verdict(report: Report) -> str:
    device = report.pricing.device
    needed, has = report.pricing.needed_bytes, device.memory_bytes
    limit, peak, over = report.pricing.limit, report.pricing.peak_bytes, report.pricing.over_limit_bytes
    if limit is not None and over:
        return f"DOES NOT FIT: {gib(peak)} at the peak, {gib(limit)} by fsdp.memory_limit: {gib(over)} too much"
    if report.fits:
        held = "" if limit is None else f"; {gib(peak)} at the peak, {gib(limit)} by fsdp.memory_limit"
        return f"FITS: {gib(needed)} of {gib(has)} on each {device.name}, {gib(has - needed)} spare{held}"
    return f"DOES NOT FIT: {gib(needed)} needed, {gib(has)} on each {device.name}: {gib(needed - has)} too much"


def label(report: Report, figure: str) -> str:
    """The basis of a figure as text, such as `roofline: attention, across not fitted`."""
    word, missing = report.provenance[figure], report.unfitted_constants.get(figure, ())
    shown = len(missing) and report.pricing.device.fitted
    return f"{word}: {', '.join(missing)} not fitted" if shown else word


def step_text(report: Report) -> str:
    """The seconds of a step, or their range on a device of which only the data sheet is known."""
    both = report.step_range_s
    return seconds(report.pricing.step_s) if both is None else " to ".join(map(seconds, both))


def pipeline_words(report: Report) -> str:
    """The pipeline of a plan in words: schedule, stages, micro-batches and bubble; "" without one."""
    pipeline = report.pricing.pipeline
    if pipeline is None:
        return "" if report.job.stacking is None else str(report.job.stacking)
    table = pipeline.table
    rounds = f" x {table.rounds} rounds" if table.rounds > 1 else ""
    return (
        f"{table.schedule}, {table.devices} stages{rounds}, {table.micro_batches} micro-batches: "
        f"{100 * pipeline.bubble:.1f}% bubble"
    )


def span(names: Sequence[str]) -> str:
    """What parameters belong to: the module that has all of them, or else the first and the last module."""
    parts = [name.split(".") for name in names]
    alike = ".".join(part[0] for part in takewhile(lambda part: len({*part}) == 1, zip(*parts)))
    return pattern(alike) if alike else f"{parts[0][0]} to {parts[-1][0]}"
