"""The plan as text: at most 60 lines of 100 columns, or of 80 and more for a narrower terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from tpshard.diagnostics.diagnostic import plural
from tpshard.plan.report.order_rows import order_text
from tpshard.plan.report.screen_tables import buckets, collectives, home, letters, pipeline_rows, reshards, shardings
from tpshard.plan.report.screen_words import HEIGHT, LABELS, WIDTH, cut, label, step_text, verdict, wrap
from tpshard.plan.step import expert_routing, forecast
from tpshard.plan.step.units import count, gib, memory_text, seconds
from tpshard.programs.fit.batching import BatchPlan

if TYPE_CHECKING:
    from tpshard.plan.report.report import Edit, PlannedJob, Report
    from tpshard.programs.fit.trained_parts import TrainedParts

MOST = 6
"""Warnings that are shown without --verbose."""
COMPILED = {"blocks": "blocks compiled"}


def screen(report: Report, *, verbose: bool = False, width: int = WIDTH) -> str:
    """The report as text without colours or markup. `verbose` lifts the limit on lines."""
    job, times = report.job, report.pricing
    how = report.provenance
    head = [
        f"plan: {job.name} ({job.recipe}), {job.what}",
        f"{verdict(report)}   [{how['memory.reserved_bytes']}]",
    ]
    head += [f"  edit: {_edit(e)}" for e in report.edits[:3]] if not report.fits else []
    assumed = " (none named: the shipped CPU)" if job.device_assumed else ""
    head += [
        f"  model   {job.model}, {count(job.params)} parameters, seq {job.seq_len}, {job.dtype}, "
        f"{COMPILED.get(job.compiled, job.compiled)}{', remat ' + job.remat if job.remat else ''}"
        f"{', offload ' + job.offload if job.offload else ''}",
        *(f"  weights {text}" for text in (job.quantized, job.weights) if text),
        *([] if report.trained is None else _trained(report.trained, verbose)),
        *([f"  experts {job.experts}"] if job.experts else []),
        *([f"  orders  {order_text(report.act_orders)}"] if report.act_orders else []),
        f"  mesh    {' x '.join(f'{k} {v}' for k, v in job.mesh.items())} = {report.devices} x "
        f"{times.device.name}{assumed}, {plural(job.nodes, 'host')} of {job.devices_per_node}",
        f"  batch   {_batch(job)}, {count(job.tokens)} tokens",
    ]
    whole = forecast.rows(report.forecast) if report.forecast is not None else []
    whole += expert_routing.rows(report.skew) if report.skew is not None else []
    head = wrap(head, width)
    tail = wrap([*_times(report), *whole, *_advice(report, verbose)], width)
    middle = [
        wrap(lines, width)
        for lines in (
            _memory(report, width), collectives(report, verbose, width), buckets(report, verbose, width),
            reshards(report, verbose), pipeline_rows(report, verbose, width),
        )
    ]  # fmt: skip
    rows, legend = shardings(report, width), wrap(letters(report), width)
    file = home(report)
    title = f"SHARDING  {report.annotations}   [exact]" + (f"   lines of {file}" if file else "")
    if not verbose:
        room = HEIGHT - len(head) - len(tail) - sum(map(len, middle)) - len(legend) - len(wrap([title], width)) - 1
        rows = _limit(rows, max(3, room))
    lines = [*head, *wrap([title], width), *rows, *legend, *chain(*middle[1:]), *middle[0], *tail]
    if not verbose and len(lines) > HEIGHT:
        lines = [*lines[: HEIGHT - 1], "... (--verbose shows all)"]
    return "\n".join(cut(line, width) for line in lines) + "\n"


def _trained(trained: TrainedParts, verbose: bool) -> list[str]:
    rows = [f"  {row}" for row in trained.rows()]
    return rows if verbose else _limit(rows, MOST)


def _limit(rows: list[str], room: int) -> list[str]:
    return rows if len(rows) <= room else [*rows[: room - 1], f"  ... {len(rows) - room + 1} more (--verbose)"]


def _without_expandable(report: Report) -> Iterator[str]:
    """A line where a run that does not let the allocator expand its segments would hold more."""
    held, usual = report.pricing.segmented_bytes, report.pricing.reserved_bytes
    if held is not None and held > 1.01 * usual:
        yield f"  with PYTORCH_ALLOC_CONF=expandable_segments:False, {gib(held)} would be reserved"


def _memory(report: Report, width: int) -> list[str]:
    memory, how = report.pricing.worst, report.provenance
    context = report.pricing.device.context_bytes
    needed = gib(report.pricing.needed_bytes)
    driver = f"; needed: {gib(context)} of driver and libraries more, {needed}" if context else ""
    parts = sorted(memory.at_peak.items(), key=lambda item: (-item[1], item[0]))
    words = [f"{LABELS.get(name, name)} {gib(size)}" for name, size in parts if size]
    rows = [
        f"MEMORY of a device  peak {gib(memory.peak_bytes)} allocated [{how['memory.peak_bytes']}], "
        f"{gib(report.pricing.reserved_bytes)} reserved [{how['memory.reserved_bytes']}]",
        f"  allocated: tensors; reserved: all that the allocator holds{driver}",
        *_without_expandable(report),
        f"  at {report.pricing.peak_at}",
    ]
    line = " "
    for word in words:
        if len(line) + len(word) + 3 > width:
            rows.append(line)
            line = " "
        line += f" {word} ·"
    rows.append(line.rstrip(" ·"))
    exact = ", ".join(f"{LABELS.get(k, k)} {gib(v)}" for k, v in report.pricing.static_bytes.items())
    rows.append(f"  at rest [exact]: {exact}")
    if (away := report.pricing.offloaded) is not None:
        rows.append(
            f"  in the host's memory: {gib(away.held_bytes)} pinned for a device, "
            f"{gib(away.held_bytes * report.job.devices_per_node)} for a host; {gib(away.moved_bytes)} a step go there "
            f"and come back: {seconds(away.copying_s)}, exposed {seconds(away.exposed_s)}"
        )
    return rows


def _spread(report: Report) -> list[str]:
    """What the figures of a device of which only the data sheet is known rest on."""
    if report.step_range_s is None:
        return []
    return [
        f"  only the data sheet of {report.pricing.device.name} is known: the range is from what other GPUs reach of "
        f"theirs, and the rest holds at usual shares: {seconds(report.pricing.step_s)}"
    ]


def _times(report: Report) -> list[str]:
    t, how = report.pricing, label(report, "time")
    work = t.work_s
    rows = [
        f"TIME  step {step_text(report)} [{how}] = computing {seconds(t.compute_s)} + slowed by collectives "
        f"{seconds(t.slowed_s)} + exposed {seconds(t.exposed_s)}",
        *([f"  + waiting for other stages {seconds(t.idle_s)}"] if t.pipeline is not None else []),
        f"  matmul {seconds(work['matmul'])}, attention {seconds(work['attention'])}, memory-bound "
        f"{seconds(work['stream'])}, host {seconds(t.fixed_s)}; collectives in all {seconds(t.comm_s)}",
        *_spread(report),
        f"  {count(report.tokens_per_s_per_device)} tokens/s a device, "
        f"{count(report.tokens_per_s_per_device * report.devices)} in all",
        f"  MFU {100 * report.mfu:.1f}% = {t.useful_flops:.4g} useful FLOPs / ({report.devices} x "
        f"{report.peak_rate / 1e12:.4g} TFLOP/s x {seconds(t.step_s)})",
        f"  FLOP efficiency {report.flop_efficiency:.4f} [exact]: useful FLOPs / FLOPs of all devices",
    ]
    if report.flop_efficiency < 0.99995:  # the figure above is not 1.0000
        lost = report.devices * t.local_flops - t.useful_flops
        if t.pipeline is not None:
            rows.append("    stages of unlike size: the FLOPs of the slowest are counted for each")
        for row in [row for row in report.losses if row["wasted"] > 0.02 * lost][:2]:  # others do not explain it
            where = f"{row['op']} in {row['where']}"
            rows.append(f"    computed more than once: {where}, efficiency {row['efficiency']:.3f}")
    rows.append(f"BOTTLENECK  {report.bottleneck}")
    return rows


def _advice(report: Report, verbose: bool) -> list[str]:
    most = 3 if report.searched is None else 10
    rows = [f"  try: {_edit(e, report.pricing.step_s)}" for e in report.suggestions[:most]]
    if report.searched is not None:
        rows.append(f"  searched: {report.search_summary}")
    elif report.fits and report.job.what == "train":
        rows.append("  more: --suggest plans further changes, and combinations of them")
    rows += [f"  warning: {text}" for text in (report.warnings if verbose else report.warnings[:MOST])]
    if len(report.warnings) > MOST and not verbose:
        rows.append(f"  ... {len(report.warnings) - MOST} more warnings (--verbose)")
    if report.accuracy:
        rows.append(f"  accuracy: {report.accuracy}")
    return rows


def _batch(job: PlannedJob) -> str:
    """The sequences of a step, and in training how they are divided."""
    if job.what != "train":
        return f"{plural(job.global_sequences, 'sequence')} a step"
    data_ranks = job.global_sequences // max(1, job.per_device * job.micro_batches)
    return str(BatchPlan(job.global_sequences, data_ranks, job.per_device))


def _edit(edit: Edit, before: float | None = None) -> str:
    words = f"{edit.change}: {memory_text(edit.needed_bytes, edit.peak_bytes)}, step {seconds(edit.step_s)}"
    if before:
        words += f" ({100 * (edit.step_s / before - 1):+.0f}%)"
    return words if edit.fits else words + ", still does not fit"
