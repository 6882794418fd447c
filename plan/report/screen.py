"""The plan as text: at most 60 lines of 100 columns, or of 80 and more for a narrower terminal."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, takewhile
from typing import TYPE_CHECKING, Any

from tpshard.diagnostics.diagnostic import plural
from tpshard.parallelism import words
from tpshard.parallelism.sharding import DIM_LETTERS, notation
from tpshard.parallelism.words import axes_text
from tpshard.plan.report.order_rows import order_text
from tpshard.plan.report.pattern import pattern
from tpshard.plan.step import expert_routing, forecast
from tpshard.plan.step.figures import PricedPipeline
from tpshard.plan.step.units import count, gib, seconds
from tpshard.programs.fit.batching import BatchPlan

if TYPE_CHECKING:
    from tpshard.plan.report.report import Edit, PlannedJob, Report, Tensor
    from tpshard.programs.fit.trained_parts import TrainedParts

WIDTH, HEIGHT, NARROW = 100, 60, 80
STAGES = 4
"""Stages of a pipeline shown without --verbose."""
MOST = 6
"""Warnings that are shown without --verbose."""
LEAST = 10
"""Columns in which the beginning of a reason says something."""
COMPILED = {"blocks": "blocks compiled"}
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


def short(tensor: Tensor, home: str = "", room: float = math.inf) -> str:
    """The reason of a tensor's sharding in at most `room` columns: places in the recipe, or `heads: tp (default)`.

    Files lose their folders. If that is still too long, places in the file `home` lose the file's name, then all lose
    their words, so that only line numbers remain.
    """
    if not tensor.written_at:
        return tensor.reason if len(tensor.reason) <= room else tensor.reason.partition(":")[0]
    named = [source._replace(source=source.source.rpartition("/")[2]) for source in tensor.written_at]
    near = [words.place(source).removeprefix(f"{home}:") for source in named]
    bare = [words.place(source._replace(says="")).removeprefix(f"{home}:") for source in named]

    def join_places(places: Sequence[str]) -> str:
        return "; ".join(f"{t.says} (default)" if t.default else place for t, place in zip(named, places))

    keys = [f"{t.says.partition(':')[0]} (default)" if t.default else place for t, place in zip(named, bare)]
    if all(source.default for source in named):
        keys = [*(source.says.partition(":")[0] for source in named[:-1]), keys[-1]]
    forms = [join_places(list(map(words.place, named))), join_places(near), ", ".join(keys)]
    if all(source.default for source in named):
        forms.append(", ".join(keys).removesuffix(" (default)"))
    return next((form for form in forms if len(form) <= room), forms[-1])


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
            _memory(report, width), _collectives(report, verbose, width), _buckets(report, verbose, width),
            _reshards(report, verbose), _pipeline(report, verbose, width),
        )
    ]  # fmt: skip
    rows, legend = shardings(report, width), wrap(_letters(report), width)
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


def home(report: Report) -> str:
    """The file that decided most shardings, without its folder; "" where all are defaults."""
    written = [place.source for tensor in report.tensors for place in tensor.written_at if place.line]
    counts = Counter(source.rpartition("/")[2] for source in written if not source.startswith("<"))
    return min(counts, key=lambda name: (-counts[name], name), default="")


def shardings(report: Report, width: float = math.inf) -> list[str]:
    """A row per kind of tensor with its sharding and reason; `*` marks those that the recipe annotates. Less than 100
    columns have no room for shapes, and some rows none for a reason, which `--verbose` or `--explain` says."""
    groups: dict[tuple[str, str, str], list[Tensor]] = {}
    for tensor in report.tensors:
        stored = sharding_text(tensor.stored, tensor.dims) if tensor.stored is not None else ""
        groups.setdefault((pattern(tensor.name), sharding_text(tensor.sharding, tensor.dims), stored), []).append(
            tensor
        )
    rows = []
    for (name, used, stored), members in groups.items():
        many = f" x{len(members)}" if len(members) > 1 else ""
        how_stored = f" stored {stored}" if stored and stored != used else ""
        shape = "x".join(map(str, members[0].shape))
        mark = "*" if members[0].annotated else " "
        rows.append((f"{mark}{name}{many}", "" if width < WIDTH else shape, used + how_stored))
    wide = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    file, room = home(report), width - sum(wide) - 4 + (not wide[1])
    reasons = [short(members[0], file, room) for members in groups.values()]
    shown = [reason if len(reason) <= room or room > LEAST else "" for reason in reasons]
    return [
        f" {' '.join(text.ljust(n) for text, n in zip(row, wide) if n)} {reason}".rstrip()
        for row, reason in zip(rows, shown)
    ]


def _letters(report: Report) -> list[str]:
    """What the letters of the shardings mean: `E embed`; `V_tp` is a dim that the axis shards."""
    used = {name for tensor in report.tensors for name in tensor.dims}
    names = [f"{letter} {name}" for name, letter in DIM_LETTERS.items() if name in used]
    axes = [axis for axis, size in report.job.mesh.items() if size > 1]
    sharded = f"; _{axes[-1]}: over {axes[-1]}" if axes else ""
    return [f"  dims: {', '.join(names)}{sharded}"] if names else []


def _collectives(report: Report, verbose: bool, width: int) -> list[str]:
    if not report.lines:
        return ["COLLECTIVES  none"]
    rows = [
        f"COLLECTIVES of a device in a step [bytes exact, times {report.provenance['collectives.time_s']}]",
        _collective_row(width, "", "", "", "count", "bytes", "sent", "time", "exposed", "link"),
    ]
    merged: dict[tuple[str, str, str, str], list[float]] = {}
    for line in report.lines:
        row = merged.setdefault((line.kind, axes_text(line.axes), line.of, line.level), [0, 0, 0, 0, 0])
        for i, value in enumerate((line.count, line.bytes, line.wire_bytes, line.time_s, line.exposed_s)):
            row[i] += value
    shown = sorted(merged.items(), key=lambda item: (-item[1][3], item[0]))
    for (kind, axes, role, wire), (n, size, wire_bytes, time, exposed) in shown if verbose else shown[:9]:
        figures = (f"{n:.0f}", gib(size), gib(wire_bytes), seconds(time), seconds(exposed))
        rows.append(_collective_row(width, kind, axes, role, *figures, wire))
    if len(shown) > 9 and not verbose:
        rest = shown[9:]
        rows.append(f"  ... {len(rest)} more kinds, {seconds(sum(r[3] for _, r in rest))} (--verbose)")
    return rows


def _collective_row(
    width: int, kind: str, axes: str, role: str, n: str, size: str, sent: str, time: str, exposed: str, wire: str
) -> str:  # fmt: skip
    """A row of the table; one of less than 100 columns leaves the size of the buffers out."""
    if width < WIDTH:
        return f"  {kind:<14} {axes:<9} {role:<10} {n:>5} {sent:>10} {time:>8} {exposed:>8}  {wire}"
    return f"  {kind:<14} {axes:<12} {role:<12} {n:>7} {size:>10} {sent:>10} {time:>8} {exposed:>8}  {wire}"


def _buckets(report: Report, verbose: bool, width: int) -> list[str]:
    """FSDP's buckets: the time of each kind, the computation that it hides behind, and what stays exposed."""
    if not verbose or not report.buckets:
        return []
    merged: dict[tuple[str, ...], list[float]] = {}
    for bucket in report.buckets:
        many = f" ({len(bucket.values)})" if len(bucket.values) > 1 else ""
        of = cut(span(bucket.values) + many, 21 if width < WIDTH else 28)
        row = merged.setdefault((bucket.kind, bucket.phase, of), [0.0] * 5)
        for i, value in enumerate((1, bucket.bytes, bucket.time_s, bucket.behind_s, bucket.exposed_s)):
            row[i] += value
    return [
        f"BUCKETS of the longest program [times {report.provenance['collectives.time_s']}]",
        _bucket_row(width, "", "", "", "count", "bytes", "time", "behind", "exposed"),
        *(
            _bucket_row(width, kind, phase, of, f"{n:.0f}", gib(size), seconds(time), seconds(behind), seconds(exposed))
            for (kind, phase, of), (n, size, time, behind, exposed) in merged.items()
        ),
    ]


def _bucket_row(
    width: int, kind: str, phase: str, of: str, n: str, size: str, time: str, behind: str, exposed: str
) -> str:
    """A row of the table; one of less than 100 columns leaves the bytes out."""
    if width < WIDTH:
        return f"  {kind:<14} {phase:<9} {of:<21} {n:>5} {time:>8} {behind:>7} {exposed:>7}"
    return f"  {kind:<14} {phase:<9} {of:<28} {n:>5} {size:>10} {time:>8} {behind:>8} {exposed:>8}"


def span(names: Sequence[str]) -> str:
    """What parameters belong to: the module that has all of them, or else the first and the last module."""
    parts = [name.split(".") for name in names]
    alike = ".".join(part[0] for part in takewhile(lambda part: len({*part}) == 1, zip(*parts)))
    return pattern(alike) if alike else f"{parts[0][0]} to {parts[-1][0]}"


def _reshards(report: Report, verbose: bool) -> list[str]:
    rows = []
    for row in report.reshards if verbose else report.reshards[:2]:
        rows.append(
            f"  ! {row['count']} x {row['kind']} over {'+'.join(row['axes'])}, {gib(row['bytes'])}: {row['reason']}"
        )
    if not rows:
        return []
    hidden = len(report.reshards) - len(rows)
    more = f", {hidden} more with --verbose" if hidden else ""
    advice = "annotate the value, or on_reshard: error" if report.job.what == "train" else "serve.layout: tp_aware"
    return [f"RESHARDS nothing in the recipe asks for{more} ({advice})", *rows]


def _pipeline(report: Report, verbose: bool, width: int) -> list[str]:
    """The time and memory of each stage; with `verbose` also the schedule, a column per unit of time."""
    pipeline = report.pricing.pipeline
    if pipeline is None:
        how = report.job.stacking
        drawn = [] if how is None or not verbose else ["  the schedule", *str(how.table).splitlines()]
        return [] if how is None else [f"PIPELINE  {pipeline_words(report)}", *drawn]
    wide = min(21, (width - 38) // len(pipeline.kinds))
    rows = [
        f"PIPELINE  {pipeline_words(report)} [{report.provenance['time']}]",
        f"  split {_runs([stage.layers for stage in pipeline.stages])} "
        + ("balances the stages; " if pipeline.balanced else "as pipeline.split says; ")
        + _slowest(pipeline),
        "  stage  layers  " + "".join(f"{words:>{wide}}" for words in pipeline.kinds) + "       kept      sent",
    ]
    shown = pipeline.stages if verbose else pipeline.stages[:STAGES]
    for stage in shown:
        times = "".join(f"{seconds(stage.seconds[kind]):>{wide}}" for kind in stage.seconds)
        rows.append(
            f"  {stage.stage:>5}  {stage.layers:>6}  {times}{gib(stage.saved_bytes):>11}{gib(stage.sent_bytes):>10}"
        )
    if len(shown) < len(pipeline.stages):
        rows.append(f"  ... {len(pipeline.stages) - len(shown)} more stages (--verbose)")
    held = "micro-batches held" if width >= WIDTH else "held"
    rows.append(f"  device  busy in a step   waiting  once a step   peak memory  {held}")
    places = list(enumerate(pipeline.devices))
    for i, device in places if verbose else places[:STAGES]:
        rows.append(
            f"  {i:>6}{seconds(device.busy_s):>16}{seconds(pipeline.seconds - device.busy_s):>10}"
            f"{seconds(device.once_s):>13}{gib(device.peak_bytes):>14}{device.held:>{len(held) + 2}}"
        )
    return rows + (["  the schedule", *str(pipeline.table).splitlines()] if verbose else [])


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


def _slowest(pipeline: PricedPipeline) -> str:
    above = 100 * pipeline.above_mean
    if above < 1:
        return "all devices take the same time"
    return f"device {pipeline.slowest} is the slowest, {above:.0f}% above the mean"


def _runs(numbers: Sequence[int]) -> str:
    """Formats numbers as text; four or more equal ones in a row become `2 x 8`."""
    runs = [(number, len(list(same))) for number, same in groupby(numbers)]
    return ", ".join(f"{n} x {number}" if n > 3 else ", ".join([str(number)] * n) for number, n in runs)


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


def step_text(report: Report) -> str:
    """The seconds of a step, or their range on a device of which only the data sheet is known."""
    both = report.step_range_s
    return seconds(report.pricing.step_s) if both is None else " to ".join(map(seconds, both))


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
    words = f"{edit.change}: {gib(edit.needed_bytes)}, step {seconds(edit.step_s)}"
    if before:
        words += f" ({100 * (edit.step_s / before - 1):+.0f}%)"
    return words if edit.fits else words + ", still does not fit"
