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
    """How a result reads a source along a dim: its position `i` is position `i + first` of the source."""

    source: int
    source_size: int
    result: int
    result_size: int
    first: int
    grains: tuple[int, int] = (1, 1)
    """The grains of the source and of the result."""


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

    rounds: tuple[Round, ...]
    places: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]
    """Per result and device, the parts of its shard as (where it begins, place minus that). Places count the elements
    of [what the device has, the strip of the first round, that of the second, ...]."""

    def price(self, element_bytes: float, latency: float) -> float:
        """The bytes that a device sends, plus the latency of each permute in bytes."""
        return sum(latency + element_bytes * each.width for each in self.rounds)


@lru_cache(maxsize=100_000)
def runs_of(reads: tuple[Read, ...], axes: Axes) -> RunPlan:
    """The runs by which results read sources, all sharded over `axes` along the dim."""
    base, held = {}, 0
    for read in reads:
        if read.source not in base:
            base[read.source] = held
            held += local_size(read.source_size, axes, read.grains[0])
    runs = [run for read in reads for run in _overlaps(read, base[read.source], axes)]
    away = [run for run in runs if run.source != run.target]
    members = size_of(axes)

    def hop(run: ElementRun) -> int:
        return (run.target - run.source) % members

    orders = (lambda run: (-run.length, hop(run), run), lambda run: (run.result, hop(run), run))
    groups = min((_disjoint(sorted(away, key=order)) for order in orders), key=lambda g: (_width(g), len(g)))
    places: list[list[dict[int, int]]] = [[{} for _ in range(members)] for _ in range(1 + max(r.result for r in reads))]
    for run in runs:
        if run.source == run.target:
            places[run.result][run.target][run.at] = run.start - run.at
    rounds, end = [], held
    for group in groups:
        width = max(run.length for run in group)
        starts = {run.source: min(run.start, held - width) for run in group}
        for run in group:
            places[run.result][run.target][run.at] = end + run.start - starts[run.source] - run.at
        end += width
        begins = tuple(starts.get(i, 0) for i in range(members))
        rounds.append(Round(width, begins, _completed({run.source: run.target for run in group}, members)))
    return RunPlan(tuple(rounds), tuple(tuple(tuple(sorted(p.items())) for p in result) for result in places))


def _overlaps(read: Read, base: int, axes: Axes) -> list[ElementRun]:
    """The runs of one result that lie in one source, of which a device's shard begins at place `base`."""
    have = spans(read.source_size, axes, read.grains[0])
    begins = [begin for begin, _ in have]
    out = []
    for target, (begin, end) in enumerate(spans(read.result_size, axes, read.grains[1])):
        at, last = max(begin + read.first, 0), min(end + read.first, read.source_size)
        while at < last:
            source = bisect_right(begins, at) - 1
            length = min(last, have[source][1]) - at
            out.append(
                ElementRun(source, base + at - have[source][0], target, read.result, at - read.first - begin, length)
            )
            at += length
    return out


def _disjoint(runs: Sequence[ElementRun]) -> list[list[ElementRun]]:
    """Groups in which no two runs have the same source or the same target: each run joins the first that it can."""
    groups: list[tuple[list[ElementRun], set[int], set[int]]] = []
    for run in runs:
        free = (group for group in groups if run.source not in group[1] and run.target not in group[2])
        if (group := next(free, None)) is None:
            groups.append(group := ([], set(), set()))
        group[0].append(run)
        group[1].add(run.source)
        group[2].add(run.target)
    return [group for group, _, _ in groups]


def _width(groups: Sequence[Sequence[ElementRun]]) -> int:
    return sum(max(run.length for run in group) for group in groups)


def _completed(to: dict[int, int], members: int) -> tuple[int, ...]:
    """The targets of a permute of all devices; those that send nothing keep their strip where they can."""
    free = set(range(members)) - set(to.values())
    to |= {i: i for i in free if i not in to}
    rest = sorted(free - set(to.values()))
    return tuple(to[i] if i in to else rest.pop() for i in range(members))
