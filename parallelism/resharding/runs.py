"""Runs of elements that move between the shards of a dim, all in as few and as narrow permutes as possible.

A slice, a split or a concatenation divides a dim at other places than its shards do. Each device then needs a few runs
of elements that others have. In one permute every device sends one run and receives one, so that the results of a split
share permutes: `gate, up = x.chunk(2)` sends every element at most once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from tpshard.parallelism.mesh import Axes, size_of
from tpshard.parallelism.sharding import local_size, spans


class Read(NamedTuple):
    """How a result reads a source along a dim: its position `i` is position `i x stride + first` of the source."""

    source: int
    source_size: int
    result: int
    result_size: int
    first: int
    grains: tuple[int, int] = (1, 1)
    """The grains of the source and of the result."""
    stride: int = 1
    """Of the elements that devices keep of their shards of the source before anything moves."""
    within: tuple[int, int] | None = None
    """The positions of the result that read it, from the first to the one behind the last; None: all."""
    mirrored: bool = False
    """Whether its position `i` is position `i` from the source's end. It gets its elements in the source's order, those
    of its shard at the shard's end, so that flipping the shard gives the result."""
    spread: int = 1
    """If more than 1, position `i` is position `(i + first) / spread` of the source where that is whole. A device gets
    these elements alone, one after the other from the first that its shard may have."""


class ElementRun(NamedTuple):
    """Consecutive elements that device `source` has and device `target` needs; they may be the same."""

    source: int
    start: int
    """The place in what the source device has: its shards of all sources, one after the other."""
    target: int
    result: int
    at: int
    """The place in the target's shard of the result."""
    length: int


class Round(NamedTuple):
    """A permute: every device sends a strip of `width` elements, which begins at `starts[i]`, to device `to[i]`."""

    width: int
    starts: tuple[int, ...]
    to: tuple[int, ...]


class RunPlan(NamedTuple):
    """The plan by which all devices get their shards of all results."""

    kept: tuple[ElementRun, ...]
    """The runs that devices have themselves."""
    sent: tuple[tuple[ElementRun, ...], ...]
    """The runs of each permute."""
    held: int
    """The number of elements that a device has."""
    members: int
    results: int

    def price(self, element_bytes: float, latency: float) -> float:
        """The bytes that a device sends, plus the latency of each permute in bytes."""
        return sum(latency + element_bytes * _width(group) for group in self.sent)

    @property
    def rounds(self) -> list[Round]:
        """The permutes. A device without a run to send sends anything, to itself where it can."""
        out = []
        for group in self.sent:
            width, by_source = _width(group), {run.source: run for run in group}
            starts = [
                min(run.start, self.held - width) if (run := by_source.get(i)) else 0 for i in range(self.members)
            ]
            out.append(Round(width, tuple(starts), _completed({r.source: r.target for r in group}, self.members)))
        return out

    @property
    def places(self) -> list[list[list[tuple[int, int]]]]:
        """Per result and device, the parts of its shard as (where it begins, place minus that). Places count the
        elements of [what the device has, the strip of the first round, that of the second, ...]."""
        out: list[list[list[tuple[int, int]]]] = [[[] for _ in range(self.members)] for _ in range(self.results)]
        for run in self.kept:
            out[run.result][run.target].append((run.at, run.start - run.at))
        end = self.held
        for group in self.sent:
            width = _width(group)
            for run in group:  # its strip may have to begin before it
                behind = max(0, run.start - (self.held - width))
                out[run.result][run.target].append((run.at, end + behind - run.at))
            end += width
        return [[sorted(parts) for parts in shards] for shards in out]


@lru_cache(maxsize=100_000)
def runs_of(reads: tuple[Read, ...], axes: Axes) -> RunPlan:
    """The runs by which results read sources, all sharded over `axes` along the dim."""
    base: dict[int, int] = {}
    held = 0
    for read in reads:
        if read.source not in base:
            base[read.source] = held
            held += -(-local_size(read.source_size, axes, read.grains[0]) // read.stride)
    runs = [run for read in reads for run in _overlaps(read, base[read.source], axes)]
    away = [run for run in runs if run.source != run.target]
    members = size_of(axes)

    def hop(run: ElementRun) -> int:
        return (run.target - run.source) % members

    plans = (
        _disjoint(sorted(away, key=lambda run: (-run.length, hop(run), run))),
        _disjoint(sorted(away, key=lambda run: (run.result, hop(run), run))),
    )
    sent = min(plans, key=lambda groups: (sum(map(_width, groups)), len(groups)))
    kept = tuple(run for run in runs if run.source == run.target)
    return RunPlan(kept, tuple(map(tuple, sent)), held, members, 1 + max(read.result for read in reads))


def _overlaps(read: Read, base: int, axes: Axes) -> list[ElementRun]:
    """The runs of one result that lie in one source, of which a device's shard begins at place `base`."""
    # what each device has, as positions of the result, or of the source of one that is spread
    first = read.first if read.spread == 1 else 0
    have = [
        tuple(-((first - place) // read.stride) for place in span)
        for span in spans(read.source_size, axes, read.grains[0])
    ]
    begins = [begin for begin, _ in have]
    part = local_size(read.result_size, axes, read.grains[1])
    least, most = read.within or (0, read.result_size)
    out = []
    for target, span in enumerate(spans(read.result_size, axes, read.grains[1])):
        begin, end = span if read.spread == 1 else (-(-(place + read.first) // read.spread) for place in span)
        place = -begin
        if read.mirrored:
            begin, end = read.result_size - end, read.result_size - begin
            place = part - end
        at, last = max(begin, begins[0], least), min(end, have[-1][1], most)
        while at < last:
            source = bisect_right(begins, at) - 1
            run = min(last, have[source][1]) - at
            out.append(ElementRun(source, base + at - begins[source], target, read.result, place + at, run))
            at += run
    return out


def _disjoint(runs: Sequence[ElementRun]) -> list[list[ElementRun]]:
    """Groups in which no two runs have the same source or the same target: each run joins the first that it can."""
    groups: list[list[ElementRun]] = []
    used: dict[tuple[str, int], int] = {}  # the groups of each device's runs, as bits
    for run in runs:
        ends = (("source", run.source), ("target", run.target))
        taken = used.get(ends[0], 0) | used.get(ends[1], 0)
        first = (~taken & (taken + 1)).bit_length() - 1
        if first == len(groups):
            groups.append([])
        groups[first].append(run)
        used |= {end: used.get(end, 0) | 1 << first for end in ends}
    return groups


def _width(group: Sequence[ElementRun]) -> int:
    return max(run.length for run in group)


def _completed(to: dict[int, int], members: int) -> tuple[int, ...]:
    """The targets of a permute of all devices; those that send nothing keep their strip where they can."""
    free = set(range(members)) - set(to.values())
    to |= {i: i for i in free if i not in to}
    rest = sorted(free - set(to.values()))
    return tuple(to[i] if i in to else rest.pop() for i in range(members))
