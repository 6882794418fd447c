"""Between the dims of a tensor and the factors of a rule: which axes lie on which, and what fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tpshard.parallelism.mesh import Axes, Axis, merge, remainder, size_of, starts_with, without
from tpshard.parallelism.sharding import Layout, even_grains


class Cut(NamedTuple):
    """How a factor is spread: its axes, outer to inner, and the number of neighbours that no cut separates."""

    axes: Axes = ()
    grain: int = 1


WHOLE = Cut()


def divisor(axis: Axis, room: int) -> Axis | None:
    """The major part of an axis that divides `room`."""
    for size in range(axis.size, 1, -1):
        if axis.size % size == 0 and room % size == 0:
            return Axis(axis.name, axis.pre, size)
    return None


def limit(axes: Axes, mine: Axes, taken: Iterable[Axis]) -> Axes:
    """`axes` cut before the first part beyond `mine` that is taken."""
    extra = remainder(axes, mine) if starts_with(axes, mine) else ()
    if not extra:
        return axes
    return merge((*mine, *without(extra, taken)))


def project(dims: Sequence[Axes], rule_dims: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> dict[int, Axes]:
    """A tensor's sharding as axes per factor: each dim's axes fill its factors, major to minor."""
    out: dict[int, Axes] = {}
    for axes, members in zip(dims, rule_dims):
        if len(members) == 1:
            out[members[0]] = axes
            continue
        rest = list(axes)
        for position, f in enumerate(members):
            if position == len(members) - 1:
                out[f] = merge(rest)
                break
            room, taken = sizes[f], []
            while rest and room > 1:
                axis = rest[0]
                if room % axis.size == 0:
                    taken.append(rest.pop(0))
                    room //= axis.size
                    continue
                part = divisor(axis, room)
                if part is None:
                    break
                taken.append(part)
                rest[0] = Axis(axis.name, part.end, axis.size // part.size)
                room //= part.size
                break
            out[f] = merge(taken)
            if room > 1:
                for g in members[position + 1 :]:
                    out[g] = ()
                break
    return out


def unproject(members: Sequence[int], factors: Mapping[int, Axes], sizes: Sequence[int]) -> Axes:
    """Factor axes concatenated, up to the first factor that is not fully sharded: no strided layouts."""
    out: list[Axis] = []
    for f in members:
        out.extend(factors.get(f, ()))
        if size_of(factors.get(f, ())) != sizes[f]:
            break
    return merge(out)


def cuts(layout: Layout, rule_dims: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> dict[int, Cut]:
    """A layout as a cut per factor: `project`, for dims that may be cut unevenly."""
    out: dict[int, Cut] = {}
    for dim, (axes, members) in enumerate(zip(layout.dims, rule_dims)):
        grain, last = layout.grain(dim), len(members) - 1
        if grain > 1:  # the major-most factor whose elements the grains are multiples of takes what is uneven
            minor = [math.prod(sizes[f] for f in members[i + 1 :]) for i in range(len(members))]
            fitting = [
                i for i, f in enumerate(members) if grain % minor[i] == 0 and sizes[f] % (grain // minor[i]) == 0
            ]
            if not fitting:
                continue
            last, grain = fitting[0], grain // minor[fitting[0]]
        for f, found in project((axes,), (members[: last + 1],), sizes).items():
            out[f] = Cut(found, grain if f == members[last] else 1)
        out.update((f, WHOLE) for f in members[last + 1 :])
    return out


def layout_of(dims: Sequence[tuple[int, ...]], cut: Mapping[int, Cut], sizes: Sequence[int]) -> Layout:
    """Inverse of `cuts`: the layout of a tensor whose factors are cut so; axes that no layout can hold are left out."""
    out: list[Axes] = []
    grains: list[int] = []
    for members in dims:
        out.append(unproject(members, {f: cut[f].axes for f in members if f in cut}, sizes))
        grain = 1
        for i, f in enumerate(members):
            have = cut.get(f, WHOLE)
            if size_of(have.axes) != sizes[f]:
                grain = have.grain * math.prod(sizes[g] for g in members[i + 1 :])
                break
        grains.append(grain)
    shape = [math.prod(sizes[f] for f in members) for members in dims]
    return Layout(tuple(out), grains=even_grains(shape, out, grains))
