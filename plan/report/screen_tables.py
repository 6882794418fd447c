"""The tables of a plan's screen: shardings, collectives, buckets, reshards, stages of a pipeline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from tpshard.parallelism import words
from tpshard.parallelism.sharding import DIM_LETTERS
from tpshard.parallelism.words import axes_text
from tpshard.plan.report.pattern import pattern
from tpshard.plan.step.figures import PricedPipeline
from tpshard.plan.step.units import gib, seconds

if TYPE_CHECKING:
    from tpshard.plan.report.report import Report, Tensor
from tpshard.plan.report.screen_words import WIDTH, cut, pipeline_words, sharding_text, span

STAGES = 4
"""Stages of a pipeline shown without --verbose."""
LEAST = 10
"""Columns in which the beginning of a reason says something."""


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


def letters(report: Report) -> list[str]:
    """What the letters of the shardings mean: `E embed`; `V_tp` is a dim that the axis shards."""
    used = {name for tensor in report.tensors for name in tensor.dims}
    names = [f"{letter} {name}" for name, letter in DIM_LETTERS.items() if name in used]
    axes = [axis for axis, size in report.job.mesh.items() if size > 1]
    sharded = f"; _{axes[-1]}: over {axes[-1]}" if axes else ""
    return [f"  dims: {', '.join(names)}{sharded}"] if names else []


def collectives(report: Report, verbose: bool, width: int) -> list[str]:
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


def buckets(report: Report, verbose: bool, width: int) -> list[str]:
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


def reshards(report: Report, verbose: bool) -> list[str]:
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


def pipeline_rows(report: Report, verbose: bool, width: int) -> list[str]:
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


def _slowest(pipeline: PricedPipeline) -> str:
    above = 100 * pipeline.above_mean
    if above < 1:
        return "all devices take the same time"
    return f"device {pipeline.slowest} is the slowest, {above:.0f}% above the mean"


def _runs(numbers: Sequence[int]) -> str:
    """Formats numbers as text; four or more equal ones in a row become `2 x 8`."""
    runs = [(number, len(list(same))) for number, same in groupby(numbers)]
    return ", ".join(f"{n} x {number}" if n > 3 else ", ".join([str(number)] * n) for number, n in runs)
