"""Resharding: the cheapest sequence of collectives from one layout to another, by Dijkstra's algorithm over layouts.

Moves are all-gather, slice (free), all-to-all, reduce-scatter, all-reduce and permute. Each costs a latency plus its
ring bytes. Consecutive moves of one kind become one collective over several axes and dims.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import itemgetter

from tpshard.parallelism.mesh import Axes, Axis, atoms, intersection, merge, overlap, size_of, split
from tpshard.parallelism.resharding.reshard_moves import (
    Move,
    Parts,
    State,
    moved_axes,
    relabel_towards,
    same_pieces,
    useful_moves,
)
from tpshard.parallelism.resharding.runs import Read, RunPlan, runs_of
from tpshard.parallelism.sharding import Layout, even, even_grains, local_bytes, local_shape, local_size

LATENCY_BYTES = 20_000
"""The cost of starting a collective, in bytes that could be sent meanwhile; used only to compare plans."""


FREE = ("slice", "mask", "spread")
"""Moves that send nothing."""


@dataclass(frozen=True)
class ReshardStep:
    """One move of a resharding. `parts`: (axis, from dim, to dim), with -1 for no dim."""

    kind: str
    """gather, scatter (reduce-scatter), reduce (all-reduce), exchange (all-to-all), slice, mask, spread, permute, or
    regrain, which moves a dim's elements to shards with another grain."""
    parts: tuple[tuple[Axis, int, int], ...]
    before: Layout
    after: Layout
    grains: tuple[int, ...] = ()
    """The grain of each dim, common to both layouts, even where one of them divides the dim evenly."""

    def grain(self, dim: int) -> int:
        return self.grains[dim] if self.grains else 1

    def axes_from(self, dim: int) -> Axes:
        """The axes that no longer shard a dim, outer to inner."""
        return intersection(self.before.dims[dim], [axis for axis, source, _ in self.parts if source == dim])

    def axes_to(self, dim: int) -> Axes:
        """The axes that shard a dim from now on, outer to inner."""
        return intersection(self.after.dims[dim], [axis for axis, _, to in self.parts if to == dim])

    def runs(self, shape: Sequence[int]) -> tuple[int, RunPlan]:
        """The dim of a regrain of a tensor of this shape, and the runs by which its elements move."""
        dim = self.parts[0][1]
        grains = (self.before.grain(dim), self.after.grain(dim))
        return dim, runs_of((Read(0, shape[dim], 0, shape[dim], 0, grains),), self.before.dims[dim])


def cost(steps: Sequence[ReshardStep], shape: Sequence[int], itemsize: int, latency: int = LATENCY_BYTES) -> float:
    """The cost of a sequence of steps: the bytes that one device sends in rings, plus latencies."""
    total = 0.0
    for s in steps:
        before, after = (local_bytes(shape, layout, itemsize) for layout in (s.before, s.after))
        if s.kind == "regrain":
            dim, runs = s.runs(shape)
            total += runs.price(before / local_shape(shape, s.before)[dim], latency)
            continue
        if s.kind == "exchange":
            before = _exchange_bytes(shape, s.before, s.after, s.parts, itemsize)
        total += _price(s.kind, s.parts, before, after, latency)
    return total


def _price(kind: str, parts: Parts, before: int, after: int, latency: int = LATENCY_BYTES) -> float:
    """The cost of one move, padding included. `before` and `after` are the bytes of a device's shard; for an exchange,
    `before` is its buffer."""
    if kind in FREE:
        return 0.001
    n = size_of(axis for axis, _, _ in parts)
    moved = {
        "gather": before * (n - 1.0), "scatter": after * (n - 1.0), "reduce": 2 * before * (n - 1) / n,
        "exchange": before * (n - 1) / n, "permute": float(before),
    }[kind]  # fmt: skip
    return latency + moved


def _exchange_bytes(shape: Sequence[int], before: Layout, after: Layout, parts: Parts, itemsize: int) -> int:
    """The bytes of an all-to-all's buffer: a piece for every device of its group, the last ones padded."""
    cut = {to for _, _, to in parts}
    pieces = (
        local_size(n, (after if d in cut else before).dims[d], before.grain(d) if d not in cut else after.grain(d))
        for d, n in enumerate(shape)
    )
    return size_of(axis for axis, _, _ in parts) * math.prod(pieces) * itemsize


@lru_cache(maxsize=100_000)
def redistribution(
    shape: tuple[int, ...], source: Layout, target: Layout, itemsize: int, latency: int = LATENCY_BYTES
) -> tuple[ReshardStep, ...]:
    """Searches the cheapest steps that reshard a tensor from layout `source` to `target`.

    The target's partial axes must be among the source's, or unused by it: then a replicated value becomes partial by a
    mask, which keeps it on one coordinate; or shard it: then shards become parts of a sum, each with zeros where the
    others are. latency: the cost of starting a collective, in bytes; 0 for collectives that will share buckets.
    """
    source = _normal(shape, source)
    target = _normal(shape, target)
    if source == target:
        return ()
    grains, apart = _grains(shape, source, target)
    if apart:
        ways = _through_other_grains(shape, source, target, apart, itemsize, latency)
        return min(ways, key=lambda steps: cost(steps, shape, itemsize, latency))
    # a dim with a grain is a dim of fewer, larger elements
    blocks = tuple(n // g for n, g in zip(shape, grains))
    steps = _join(_Search(blocks, source, target, itemsize * math.prod(grains), latency).run())
    if not any(g > 1 for g in grains):
        return tuple(steps)

    def with_grains(layout: Layout) -> Layout:
        return layout._replace(grains=even_grains(shape, layout.dims, grains))

    return tuple(ReshardStep(s.kind, s.parts, with_grains(s.before), with_grains(s.after), grains) for s in steps)


def _through_other_grains(
    shape: tuple[int, ...], source: Layout, target: Layout, apart: Sequence[int], itemsize: int, latency: int
) -> Iterator[tuple[ReshardStep, ...]]:
    """Yields ways to reshard a tensor whose layouts divide the dims `apart` at different elements.

    These dims are made whole, or, where both layouts shard them over the same axes, regrained at the start or the end.
    """

    def plan(before: Layout, after: Layout) -> tuple[ReshardStep, ...]:
        return redistribution(shape, before, after, itemsize, latency)

    def regrained(layout: Layout, other: Layout) -> Layout:
        grains = (other.grain(d) if d in apart else layout.grain(d) for d in range(len(shape)))
        return _normal(shape, layout._replace(grains=tuple(grains)))

    def regrain(before: Layout, after: Layout) -> Iterator[ReshardStep]:
        for d in apart:
            between = _normal(shape, before._replace(grains=tuple(
                (after if e == d else before).grain(e) for e in range(len(shape)))))  # fmt: skip
            yield ReshardStep("regrain", tuple((axis, d, d) for axis in before.dims[d]), before, between)
            before = between

    whole = source._replace(dims=tuple(() if d in apart else axes for d, axes in enumerate(source.dims)))
    whole = _normal(shape, whole)
    yield plan(source, whole) + plan(whole, target)
    if all(source.dims[d] == target.dims[d] for d in apart):
        first, last = regrained(source, target), regrained(target, source)
        yield (*regrain(source, first), *plan(first, target))
        yield (*plan(source, last), *regrain(last, target))


def _normal(shape: Sequence[int], layout: Layout) -> Layout:
    dims = tuple(merge(d) for d in layout.dims)
    grains = even_grains(shape, dims, layout.grains) if layout.grains else ()
    return Layout(dims, merge(sorted(layout.partial)), layout.kind, grains)


def _grains(shape: Sequence[int], source: Layout, target: Layout) -> tuple[tuple[int, ...], list[int]]:
    """The grain of each dim that suits both layouts, and the dims for which there is none (their grain here is 1)."""
    grains: list[int] = []
    apart: list[int] = []
    for d, (size, a, b) in enumerate(zip(shape, source.dims, target.dims)):
        one, other = source.grain(d), target.grain(d)
        if one == other or not b or (other == 1 and even(size // one, b)):
            grains.append(one)
        elif not a or (one == 1 and even(size // other, a)):
            grains.append(other)
        else:
            grains.append(1)
            apart.append(d)
    return tuple(grains), apart


TRIES = 200
"""The largest number of layouts that a search over parts of axes visits."""

SWELLING = 2.0
"""The cost of a byte of memory beyond the larger of source and target shard, relative to that of a byte sent."""


class _Search:
    """A search for the cheapest sequence of moves that reshard a tensor of `shape` from `source` to `target`."""

    def __init__(self, shape: tuple[int, ...], source: Layout, target: Layout, itemsize: int, latency: int):
        self.shape, self.source, self.target, self.itemsize, self.latency = shape, source, target, itemsize, latency
        self.shard_bytes = cache(self._shard_bytes)  # many sequences lead to the same layout
        self.bound = max(self.shard_bytes(source.dims), self.shard_bytes(target.dims))

    def _shard_bytes(self, dims: tuple[Axes, ...]) -> int:
        return math.prod(local_size(n, merge(axes)) for n, axes in zip(self.shape, dims)) * self.itemsize

    def run(self) -> list[ReshardStep]:
        """The cheapest sequence; sequences that swap axes between dims are tried only if others may be worse."""
        source, target = self.source, self.target
        cuts = atoms((*source.dims, source.partial, *target.dims, target.partial))
        best = self.cheapest(source, cuts, swaps=False)
        assert best is not None, f"no way from {source.show()} to {target.show()} for shape {list(self.shape)}"
        transfers = [s for s in _join(best[1]) if s.kind not in FREE]
        least = self.shard_bytes(target.dims)
        swells = any(s.kind == "gather" and self.shard_bytes(s.after.dims) > least for s in transfers)
        # A sequence with a swap has a permute and a further transfer, so it is no better than a single transfer. It is
        # no better than one that only reduces either, since every partial axis must be reduced.
        needed = len(transfers) < 2 or all(s.kind in ("scatter", "reduce") for s in transfers)
        apart = any(b % a for points in cuts.values() for a, b in itertools.pairwise(points))  # parts of different axes
        if (needed and not swells) or best[0] <= 2 * self.latency or apart:
            return best[1]
        tried: list[Mapping[str, Sequence[int]]] = []
        for order in (1, -1):
            fine = {name: _primes(points, order) for name, points in cuts.items()}
            if fine not in tried:  # equal refinements, as for a power of two, give the same search
                tried.append(fine)
                best = min(best, self.slice_and_permute(fine) or best, key=itemgetter(0))
                best = self.cheapest(source, fine, swaps=True, limit=best[0], most=TRIES) or best
        return best[1]

    def slice_and_permute(self, cuts: Mapping[str, Sequence[int]]) -> tuple[float, list[ReshardStep]] | None:
        """A sequence that slices over the axes that only the target has, then permutes, then takes the cheapest rest.

        Returns it with its price; None where there is none.
        """
        shape, source, target = self.shape, self.source, self.target
        goal = tuple(split(d, cuts) for d in target.dims)
        dims = tuple(split(d, cuts) for d in source.dims)
        partial = split(source.partial, cuts)
        best = None
        for slicing in (True, False):
            rows = [list(axes) for axes in dims]
            used = [axis for axes in (*dims, partial) for axis in axes]
            for d, axes in enumerate(goal) if slicing else ():
                for axis in axes:
                    if not overlap(axis, used) and even(shape[d], (*rows[d], axis)):
                        rows[d].append(axis)
            sliced = tuple(map(tuple, rows))
            laid = relabel_towards(sliced, goal, partial)
            if laid is None or not same_pieces(shape, sliced, laid):
                continue
            first, second = (_layout((d, partial), source.kind) for d in (sliced, laid))
            steps = []
            if sliced != dims:
                added = tuple((a, -1, d) for d, axes in enumerate(sliced) for a in axes[len(dims[d]) :])
                steps.append(ReshardStep("slice", added, source, first))
            if laid != sliced:
                steps.append(ReshardStep("permute", moved_axes(sliced, laid), first, second))
            price = cost(steps, shape, self.itemsize, self.latency)
            coarse = atoms((*second.dims, second.partial, *target.dims, target.partial))
            rest = self.cheapest(second, coarse, swaps=False, most=TRIES)
            if rest is not None and (best is None or price + rest[0] < best[0]):
                best = price + rest[0], steps + rest[1]
        return best

    def cheapest(
        self, source: Layout, cuts: Mapping[str, Sequence[int]], *, swaps: bool, limit: float = math.inf,
        most: float = math.inf,
    ) -> tuple[float, list[ReshardStep]] | None:  # fmt: skip
        """The cheapest sequence and its price, by Dijkstra's algorithm over pairs (layout, kind of the last move).

        cuts: the boundaries of the parts of axes that move. The price includes memory beyond that of the larger of both
        shards. Returns None if every sequence costs `limit` or more, or the search visits more than `most` layouts.
        """
        start: State = (tuple(split(d, cuts) for d in source.dims), split(source.partial, cuts))
        goal: State = (tuple(split(d, cuts) for d in self.target.dims), split(self.target.partial, cuts))
        kind = source.kind
        goal_axes = {a for d in goal[0] for a in d}
        first = (start, "")
        best: dict[tuple[State, str], float] = {first: 0.0}
        reached_by: dict[tuple[State, str], tuple[tuple[State, str], Move]] = {}
        counter = itertools.count()
        heap = [(0.0, next(counter), first)]
        tries = itertools.count()
        while heap and next(tries) <= most:
            reached_price, _, current = heapq.heappop(heap)
            state, last = current
            if state == goal:
                path: list[ReshardStep] = []
                while current != first:
                    previous, (move_kind, parts, _) = reached_by[current]
                    path.append(ReshardStep(move_kind, parts, _layout(previous[0], kind), _layout(current[0], kind)))
                    current = previous
                return reached_price, path[::-1]
            if reached_price > best[current]:
                continue
            before_bytes = self.shard_bytes(state[0])
            for move in useful_moves(self.shape, state, goal, goal_axes, kind, swaps):
                move_kind, parts, after = move
                after_bytes = self.shard_bytes(after[0])
                moved_bytes = before_bytes
                if move_kind == "exchange":
                    layouts = _layout(state, kind), _layout(after, kind)
                    moved_bytes = _exchange_bytes(self.shape, *layouts, parts, self.itemsize)
                price = _price(move_kind, parts, moved_bytes, after_bytes, self.latency)
                if last == move_kind and move_kind == "permute":
                    price = 0.001  # two permutes merge into one
                elif (
                    last == move_kind
                    and move_kind not in FREE
                    and _joinable_parts(move_kind, reached_by[current][1][1], parts)
                ):
                    price -= self.latency * 0.999
                over = after_bytes - self.bound
                if over > 0 and swaps:
                    continue
                if over > 0 and move_kind == "gather":
                    price += SWELLING * over + self.latency
                reached = (after, move_kind)
                if reached_price + price < min(limit, best.get(reached, math.inf)):
                    best[reached] = reached_price + price
                    reached_by[reached] = (current, move)
                    heapq.heappush(heap, (reached_price + price, next(counter), reached))
        return None


def _primes(points: Sequence[int], order: int) -> list[int]:
    """Refines an axis's boundaries until all parts have prime sizes, so that parts of two axes can be swapped."""
    out = list(points[:1])
    for a, b in itertools.pairwise(points):
        rest, factors = b // a, []
        for p in range(2, rest + 1):
            while rest % p == 0:
                factors.append(p)
                rest //= p
        for p in factors[::order]:
            out.append(out[-1] * p)
    return out


def _layout(state: State, kind: str) -> Layout:
    return Layout(tuple(merge(d) for d in state[0]), merge(state[1]), kind)


def _join(steps: list[ReshardStep]) -> Iterator[ReshardStep]:
    """Joins neighbouring moves of one kind over different axes into one step."""
    held: ReshardStep | None = None
    for step in steps:
        if held is None:
            held = step
        elif held.kind == step.kind == "permute":
            held = ReshardStep("permute", moved_axes(held.before.dims, step.after.dims), held.before, step.after)
        elif held.kind == step.kind and _joinable_parts(held.kind, held.parts, step.parts):
            held = ReshardStep(held.kind, (*held.parts, *step.parts), held.before, step.after)
        else:
            yield held
            held = step
    if held is not None:
        yield held


def _joinable_parts(kind: str, a: Parts, b: Parts) -> bool:
    """Whether two neighbouring moves of one kind can be one collective."""
    if {x for x, _, _ in a} & {x for x, _, _ in b}:
        return False
    if kind == "exchange":  # one all-to-all cannot both add axes to a dim and take some from it
        to_dims = {to for _, _, to in (*a, *b)}
        from_dims = {source for _, source, _ in (*a, *b)}
        return not to_dims & from_dims
    return True
