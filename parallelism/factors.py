"""Between the dims of a tensor and the factors of a rule: which axes lie on which, and what fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tpshard.parallelism.mesh import Axes, Axis, merge, remainder, size_of, starts_with, without


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
