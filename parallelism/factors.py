"""Converting the axes of a tensor's dims to those of a rule's factors, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from tpshard.parallelism.mesh import Axes, Axis, merge, remainder, size_of, starts_with, without
from tpshard.parallelism.sharding import Layout, even_grains


class Cut(NamedTuple):
    """The sharding of a factor: its axes, outer to inner, and its grain, the number of elements never separated."""

    axes: Axes = ()
    grain: int = 1


WHOLE = Cut()


def divisor(axis: Axis, room: int) -> Axis | None:
    """The largest outer sub-axis of an axis whose size divides `room`; None if it has none."""
    size = math.gcd(axis.size, room)
    return Axis(axis.name, axis.pre, size) if size > 1 else None


class FactorAxes(NamedTuple):
    """The axes of one factor in one tensor, and whether propagation may extend them."""

    axes: Axes
    open: bool
    overflow: Axes
    """Axes of the dim that the factor cannot have, because they do not divide it; later factors get none of them."""
    last: bool
    """Whether it is the minor-most factor of its dim, the only one that axes need not divide."""


def parts(
    dims: Sequence[Axes], opens: Sequence[bool], rule_dims: Sequence[tuple[int, ...]], sizes: Sequence[int]
) -> dict[int, FactorAxes]:
    """Distributes the axes of a tensor's dims over the factors of each dim, from major to minor."""
    out: dict[int, FactorAxes] = {}
    for axes, is_open, members in zip(dims, opens, rule_dims):
        if len(members) == 1:
            out[members[0]] = FactorAxes(axes, is_open, (), True)
            continue
        rest = list(axes)
        for position, f in enumerate(members):
            if position == len(members) - 1:
                out[f] = FactorAxes(merge(rest), is_open, (), True)
                break
            room, filled = sizes[f], []
            while rest and (part := divisor(rest[0], room)) is not None:
                filled.append(part)
                room //= part.size
                axis = rest.pop(0)
                if part != axis:
                    rest.insert(0, Axis(axis.name, part.end, axis.size // part.size))
            if room > 1 and rest:
                out[f] = FactorAxes(merge(filled), is_open, merge(rest), False)
                for g in members[position + 1 :]:
                    out[g] = FactorAxes((), False, (), g == members[-1])
                break
            out[f] = FactorAxes(merge(filled), is_open, (), False)
    return out


def reorder_to_fill(axes: Axes, members: Sequence[int], sizes: Sequence[int]) -> dict[int, Axes] | None:
    """A dim's axes in another order, in which they fill its factors from major to minor; None if they cannot.

    `x` of 6 does not divide a factor of 4: half of it does, together with half of the next axis."""
    out: dict[int, Axes] = {}
    rest = list(axes)
    for f in members[:-1]:
        room, fitting, left = sizes[f], [], []
        for axis in rest:
            part = divisor(axis, room)
            if part is not None:
                fitting.append(part)
                room //= part.size
            if part != axis:
                end, size = (axis.pre, axis.size) if part is None else (part.end, axis.size // part.size)
                left.append(Axis(axis.name, end, size))
        if room > 1 and left:
            return None
        out[f], rest = merge(fitting), left
    out[members[-1]] = merge(rest)
    return out


def refilled(members: Sequence[int], factors: Mapping[int, Axes], sizes: Sequence[int]) -> Axes:
    """The axes of a dim of several factors of which one is cut behind another that could be cut further: its axes cut
    the other first, for which shards change places. None where they do not divide the factors."""
    axes = tuple(axis for f in members for axis in factors.get(f, ()))
    filled = reorder_to_fill(axes, members, sizes)
    if filled is None or any(sizes[f] % size_of(cut) for f, cut in filled.items()):
        return ()
    return merge([axis for f in members for axis in filled[f]])


def project(dims: Sequence[Axes], rule_dims: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> dict[int, Axes]:
    """The axes of each factor, from the axes of a tensor's dims."""
    return {f: part.axes for f, part in parts(dims, (True,) * len(dims), rule_dims, sizes).items()}


def extension(part: FactorAxes, axes: Axes, size: int, barred: Axes) -> Axes:
    """Extends the axes of a factor towards `axes` as far as it can be sharded.

    A closed or overflowing factor is not extended. Every factor of a dim except the last must be divided evenly, by a
    sub-axis if the whole axis does not divide it.
    """
    present = part.axes
    if not starts_with(axes, present):
        return axes
    extended = list(present)
    for axis in remainder(axes, present) if part.open and not part.overflow else ():
        free = without((axis,), barred)
        if not free:
            break
        fitting: Axis | None = free[0]
        if not part.last:
            room, uneven = divmod(size, size_of(extended))
            fitting = None if uneven else divisor(free[0], room)
        if fitting is None:
            break
        extended.append(fitting)
        if fitting != axis:
            break
    return merge(extended)


def unproject(members: Sequence[int], factors: Mapping[int, Axes], sizes: Sequence[int]) -> Axes:
    """The axes of a dim: those of its factors from major to minor, up to the first that is not fully sharded.

    The axes of later factors would shard the dim with a stride, which no layout expresses; they are left out.
    """
    out: list[Axis] = []
    for f in members:
        out.extend(factors.get(f, ()))
        if size_of(factors.get(f, ())) != sizes[f]:
            break
    return merge(out)


@lru_cache(1 << 14)
def cuts(layout: Layout, rule_dims: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> Mapping[int, Cut]:
    """The cut of each factor, from a layout; like `project`, but for dims that may be divided unevenly."""
    out: dict[int, Cut] = {}
    for dim, (axes, members) in enumerate(zip(layout.dims, rule_dims)):
        grain, last = layout.grain(dim), len(members) - 1
        if grain > 1:  # the uneven part belongs to the major-most factor whose elements the grains are multiples of
            minor = [math.prod(sizes[f] for f in members[i + 1 :]) for i in range(len(members))]
            fitting = [
                i for i, f in enumerate(members) if grain % minor[i] == 0 and sizes[f] % (grain // minor[i]) == 0
            ]
            if not fitting:
                continue
            last, grain = fitting[0], grain // minor[fitting[0]]
        for f, factor_axes in project((axes,), (members[: last + 1],), sizes).items():
            out[f] = Cut(factor_axes, grain if f == members[last] else 1)
        out.update((f, WHOLE) for f in members[last + 1 :])
    return out


def layout_of(dims: tuple[tuple[int, ...], ...], cut: Mapping[int, Cut], sizes: tuple[int, ...]) -> Layout:
    """The layout of a tensor from the cuts of its factors, without axes that no layout expresses; inverse of `cuts`."""
    return _layout_of(dims, tuple(cut.items()), sizes)


@lru_cache(1 << 14)  # layers are alike
def _layout_of(dims: tuple[tuple[int, ...], ...], items: tuple[tuple[int, Cut], ...], sizes: tuple[int, ...]) -> Layout:
    cut = dict(items)
    out: list[Axes] = []
    grains: list[int] = []
    for members in dims:
        out.append(unproject(members, {f: cut[f].axes for f in members if f in cut}, sizes))
        grain = 1
        for i, f in enumerate(members):
            factor_cut = cut.get(f, WHOLE)
            if size_of(factor_cut.axes) != sizes[f] or factor_cut.grain > 1:
                grain = factor_cut.grain * math.prod(sizes[g] for g in members[i + 1 :])
                break
        grains.append(grain)
    shape = [math.prod(sizes[f] for f in members) for members in dims]
    return Layout(tuple(out), grains=even_grains(shape, out, grains))
