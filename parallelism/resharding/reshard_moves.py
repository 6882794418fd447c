"""Enumerating the moves, such as gathers and permutes, that lead from a layout towards another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tpshard.parallelism.mesh import Axes, Axis, atoms, merge, overlap, size_of, split
from tpshard.parallelism.sharding import even, refines, starts

State = tuple[tuple[Axes, ...], Axes]
"""A layout in a search: the axes of each dim, and those over which it is a partial sum."""
Parts = tuple[tuple[Axis, int, int], ...]
"""What a move does with each axis: (axis, from dim, to dim), with -1 for no dim."""
Move = tuple[str, Parts, State]
"""A kind of step, its parts, and the layout after it."""


def useful_moves(
    shape: tuple[int, ...], state: State, goal: State, goal_axes: set[Axis], kind: str, swaps: bool
) -> Iterator[Move]:
    """Yields the moves that may be useful on the way from a layout to the goal."""
    dims, partial = state
    present = [a for d in dims for a in d] + list(partial)
    used = {a for a in goal_axes | set(goal[1]) if overlap(a, present)}

    def with_axes(d: int, axes: Axes, rest: tuple[Axes, ...] = dims) -> tuple[Axes, ...]:
        return (*rest[:d], axes, *rest[d + 1 :])

    def cuts_on(d: int, outer: Axes, axes: Axes) -> bool:
        """Whether a dim sharded over `outer` becomes sharded over `axes` by dividing its pieces."""
        return refines(shape[d], merge(axes), merge(outer))

    def fits(d: int, axes: Axes) -> bool:
        """Whether a dim may become sharded over `axes`: evenly, or as in the target."""
        return even(shape[d], axes) or (axes == goal[0][d][: len(axes)] and on_the_way(d, len(axes)))

    def on_the_way(d: int, n: int) -> bool:
        """Whether the target's first `n` parts extend the present ones, and lead to the target."""
        return cuts_on(d, dims[d], goal[0][d][:n]) and cuts_on(d, goal[0][d][:n], goal[0][d])

    def additions(d: int, among: Iterable[Axis]) -> Iterator[Axes]:
        """Yields what one move can add to a dim: an axis that divides it evenly, or the target's next parts."""
        among = set(among)
        yield from ((axis,) for axis in sorted(among) if even(shape[d], (*dims[d], axis)))
        held_axes = len(dims[d])
        if dims[d] != goal[0][d][:held_axes]:
            return
        for n in range(held_axes + 1, len(goal[0][d]) + 1):
            block = goal[0][d][held_axes:n]
            if not among.issuperset(block):
                return
            if on_the_way(d, n):
                if n > held_axes + 1 or not even(shape[d], goal[0][d][:n]):
                    yield block
                return

    for d, axes in enumerate(dims):
        if not axes:
            continue
        if axes != goal[0][d][: len(axes)] or not cuts_on(d, axes, goal[0][d]):
            n = next(n for n in range(1, len(axes) + 1) if cuts_on(d, axes[:-n], axes))
            yield "gather", tuple((a, d, -1) for a in axes[-n:]), (with_axes(d, axes[:-n]), partial)
        for n in range(1, len(axes) + 1):  # the innermost n axes together, so that their order is kept
            block = axes[-n:]
            if block[0] not in goal_axes:
                break
            if not cuts_on(d, axes[:-n], axes):
                continue
            for e in range(len(dims)):
                if e != d and fits(e, (*dims[e], *block)):
                    after = with_axes(e, (*dims[e], *block), with_axes(d, axes[:-n]))
                    yield "exchange", tuple((a, d, e) for a in block), (after, partial)
    for e in range(len(dims)):
        for block in additions(e, goal_axes - used):
            yield "slice", tuple((a, -1, e) for a in block), (with_axes(e, (*dims[e], *block)), partial)
        if kind == "sum":
            for block in additions(e, (goal_axes & set(partial)) - set(goal[1])):
                rest = tuple(a for a in partial if a not in block)
                yield "scatter", tuple((a, -1, e) for a in block), (with_axes(e, (*dims[e], *block)), rest)
    for d, axes in enumerate(dims) if kind == "sum" else ():
        if axes and axes[-1] in goal[1] and cuts_on(d, axes[:-1], axes):
            yield "spread", ((axes[-1], d, -1),), (with_axes(d, axes[:-1]), tuple(sorted((*partial, axes[-1]))))
    for i, axis in enumerate(partial):
        if axis not in goal[1]:
            yield "reduce", ((axis, -1, -1),), (dims, (*partial[:i], *partial[i + 1 :]))
    for axis in goal[1]:
        if axis not in used:
            yield "mask", ((axis, -1, -1),), (dims, tuple(sorted((*partial, axis))))
    if swaps:
        yield from _swaps(shape, dims, partial, goal_axes - used)
        towards = relabel_towards(dims, goal[0], partial)
        if towards is not None and towards != dims and same_pieces(shape, dims, towards):
            yield "permute", moved_axes(dims, towards), (towards, partial)
    elif partial == goal[1] and dims != goal[0] and same_pieces(shape, dims, goal[0]):
        yield "permute", moved_axes(dims, goal[0]), goal


def _swaps(shape: tuple[int, ...], dims: tuple[Axes, ...], partial: Axes, unused: set[Axis]) -> Iterator[Move]:
    """Yields permutes that swap two axes of equal size, or replace an axis by an unused one of that size."""
    places = [(d, i, axis) for d, axes in enumerate(dims) for i, axis in enumerate(axes)]

    def permute_to(rows: list[list[Axis]]) -> Iterator[Move]:
        after = tuple(tuple(row) for row in rows)
        if same_pieces(shape, dims, after):
            yield "permute", moved_axes(dims, after), (after, partial)

    for n, (d, i, a) in enumerate(places):
        for e, k, b in places[n + 1 :]:
            if a.size == b.size:
                rows = [list(axes) for axes in dims]
                rows[d][i], rows[e][k] = b, a
                yield from permute_to(rows)
        for b in sorted(unused):
            if a.size == b.size:
                rows = [list(axes) for axes in dims]
                rows[d][i] = b
                yield from permute_to(rows)


def relabel_towards(dims: tuple[Axes, ...], goal: tuple[Axes, ...], partial: Axes) -> tuple[Axes, ...] | None:
    """Relabels the axes of all dims towards the goal without changing the size of a shard; None where impossible.

    Each dim gets as many of the goal's axes as fit, then axes that will move elsewhere.
    """
    rows: list[list[Axis]] = []
    for axes, goal_axes in zip(dims, goal):
        row: list[Axis] = []
        for axis in goal_axes:
            if axis in partial or size_of(axes) % (size_of(row) * axis.size):
                break
            row.append(axis)
        rows.append(row)
    placed = {axis for row in rows for axis in row}
    free = [axis for axes in dims for axis in axes if axis not in placed]
    going = {axis for goal_axes in goal for axis in goal_axes}  # to another dim, for which they must be innermost
    for axes, row in zip(dims, rows):
        for axis in sorted(free, key=lambda a: (a in going, a not in axes)):
            if size_of(axes) % (size_of(row) * axis.size) == 0:
                row.append(axis)
                free.remove(axis)
        if size_of(axes) != size_of(row):
            return None
    return tuple(map(tuple, rows))


def moved_places(before: Sequence[Axes], after: Sequence[Axes]) -> list[tuple[Axes, Axes]]:
    """For each dim that a permute changes, the axes before and after, without their common prefix and suffix."""
    cuts = atoms((*before, *after))
    out = []
    for one, other in zip(before, after):
        s, t = split(one, cuts), split(other, cuts)
        while s and t and s[0] == t[0]:
            s, t = s[1:], t[1:]
        while s and t and s[-1] == t[-1]:
            s, t = s[:-1], t[:-1]
        if s or t:
            out.append((s, t))
    return out


def moved_axes(before: Sequence[Axes], after: Sequence[Axes]) -> Parts:
    """The parts of a permute: the axes that change their place."""
    axes = {a for pair in moved_places(before, after) for side in pair for a in side}
    return tuple((a, -1, -1) for a in sorted(axes))


def same_pieces(shape: tuple[int, ...], source: tuple[Axes, ...], target: tuple[Axes, ...]) -> bool:
    """Whether two shardings cut every dim into the same pieces, whichever devices hold them."""
    return all(
        size_of(s) == size_of(t) and (even(n, s) or _same_uneven_cuts(n, merge(s), merge(t)))
        for n, s, t in zip(shape, source, target)
    )


PIECES = 256
"""The most pieces of an uneven dim that are compared one by one."""


def _same_uneven_cuts(size: int, source: Axes, target: Axes) -> bool:
    """Whether two shardings of a dim that they cut unevenly cut it at the same places.

    Beyond `PIECES` pieces only the sizes of the axes are compared.
    """
    if [a.size for a in source] == [a.size for a in target]:
        return True
    return size_of(source) <= PIECES and starts(size, source) == starts(size, target)
