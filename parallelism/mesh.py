"""The device mesh: ordered, named axes with sizes, and operations on (sub-)axes. Needs no process group."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple


class Axis(NamedTuple):
    """A mesh axis or a part of it: the axis of `n` devices viewed as [pre, size, n // (pre * size)].

    The whole axis is `(name, 1, n)`. Sub-axes let shardings pass views: a dim of 16 on 8 devices viewed as [2, 8] has
    its first dim on x:(1)2 and its second on x:(2)4.
    """

    name: str
    pre: int
    size: int

    @property
    def end(self) -> int:
        """The product of this part's size and everything outside of it."""
        return self.pre * self.size

    def overlaps(self, other: Axis) -> bool:
        """Whether no tensor can be sharded over both axes.

        Either the parts overlap, or no factorization of the axis has both (on six devices, x:(1)2 and x:(3)2).
        """
        return self.name == other.name and bool(other.pre % self.end and self.pre % other.end)


Axes = tuple[Axis, ...]
"""The axes of one dim, outer (major) to inner (minor)."""


class Mesh:
    """Named axes with sizes, outer to inner; device `r` has the row-major coordinate of `r`.

    >>> Mesh({"x": 4, "y": 2}).groups([Axis("y", 1, 2)])
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    """

    def __init__(self, axes: Mapping[str, int] | Iterable[tuple[str, int]]):
        pairs = tuple(axes.items()) if isinstance(axes, Mapping) else tuple(axes)
        for pair in pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(f"{pair!r} is no mesh axis: give names with sizes, such as {{'dp': 2, 'tp': 4}}")
        for name, size in pairs:
            if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"a mesh axis is named {name!r}: a name has letters, digits, `_`, `-` and `.`")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"mesh axis `{name}` has size {size!r}: a size is a whole number of at least 1")
        if len({name for name, _ in pairs}) != len(pairs):
            raise ValueError(f"a mesh axis is named twice in {[name for name, _ in pairs]}")
        self.axes: dict[str, int] = dict(pairs)
        self.order = {name: i for i, name in enumerate(self.axes)}
        self.stride: dict[str, int] = {}
        stride = 1
        for name, size in reversed(pairs):
            self.stride[name] = stride
            stride *= size
        self.ranks: int = stride

    def __repr__(self) -> str:
        return f"Mesh({self.axes})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and list(self.axes.items()) == list(other.axes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.axes.items()))

    def axis(self, ref: str | Sequence[object] | Axis) -> Axis:
        """The axis of a name, or a sub-axis given as (name, pre, size). Raises ValueError if the mesh lacks it."""
        name, *part = (ref,) if isinstance(ref, str) else tuple(ref)
        if name not in self.axes:
            raise ValueError(f"the mesh has no axis `{name}`; its axes are {', '.join(self.axes) or 'none'}")
        size = self.axes[str(name)]
        if not part:
            return Axis(str(name), 1, size)
        if len(part) != 2 or not all(isinstance(p, int) and p >= 1 for p in part):
            raise ValueError(f"a sub-axis is (name, pre, size), not {ref!r}")
        pre, sub = int(part[0]), int(part[1])  # type: ignore[call-overload]
        if size % (pre * sub):
            raise ValueError(f"sub-axis {name}:({pre}){sub} does not divide the {size} devices of axis `{name}`")
        if sub == 1 < size:
            raise ValueError(
                f"sub-axis {name}:({pre}){sub} has one device, along which nothing is sharded; leave it out"
            )
        return Axis(str(name), pre, sub)

    def index(self, axis: Axis, rank: int) -> int:
        """The position of device `rank` along a (sub-)axis."""
        whole = (rank // self.stride[axis.name]) % self.axes[axis.name]
        return (whole // (self.axes[axis.name] // axis.end)) % axis.size

    def linear_index(self, axes: Sequence[Axis], rank: int) -> int:
        """The position of device `rank` in the row-major order of `axes`."""
        position = 0
        for axis in axes:
            position = position * axis.size + self.index(axis, rank)
        return position

    def key(self, axis: Axis) -> tuple[int, int]:
        """A sort key for axes in mesh order, in which the ranks of a group are numbered."""
        return (self.order[axis.name], axis.pre)

    def sorted(self, axes: Iterable[Axis]) -> Axes:
        return merge(sorted(axes, key=self.key))

    def groups(self, axes: Iterable[Axis]) -> list[list[int]]:
        """The groups of ranks that differ only along `axes`; each ascending, which is mesh order."""
        ordered = self.sorted(axes)
        steps = [[i * self.stride[a.name] * (self.axes[a.name] // a.end) for i in range(a.size)] for a in ordered]
        offsets = [sum(combination) for combination in itertools.product(*steps)]
        bases = [r for r in range(self.ranks) if all(self.index(a, r) == 0 for a in ordered)]
        return [[base + offset for offset in offsets] for base in bases]


def require_mesh(mesh: object) -> None:
    """Raises ValueError for an argument that should be a `Mesh`, but is for example a dict of sizes."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"the mesh is {mesh!r}: give a `Mesh`, such as Mesh({{'dp': 2, 'tp': 4}})")


def size_of(axes: Iterable[Axis]) -> int:
    """The number of devices that these axes divide a dim over."""
    return math.prod(axis.size for axis in axes)


def merge(axes: Iterable[Axis]) -> Axes:
    """Joins neighbouring parts of one axis: x:(1)2, x:(2)4 -> x:(1)8; drops parts of size 1."""
    merged: list[Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        if merged and merged[-1].name == axis.name and merged[-1].end == axis.pre:
            merged[-1] = Axis(axis.name, merged[-1].pre, merged[-1].size * axis.size)
        else:
            merged.append(axis)
    return tuple(merged)


def overlap(axis: Axis, axes: Iterable[Axis]) -> bool:
    """Whether an axis overlaps any of `axes` (see `Axis.overlaps`)."""
    return any(axis.overlaps(other) for other in axes)


def atoms(lists: Iterable[Iterable[Axis]]) -> dict[str, list[int]]:
    """The boundaries of all parts in these lists (their pre and end), sorted, by axis name."""
    cuts: dict[str, set[int]] = {}
    for axes in lists:
        for axis in axes:
            cuts.setdefault(axis.name, set()).update((axis.pre, axis.end))
    return {name: sorted(points) for name, points in cuts.items()}


def split(axes: Iterable[Axis], cuts: Mapping[str, Sequence[int]]) -> Axes:
    """Divides every axis at the given boundaries, so that two lists can be compared part by part."""
    out: list[Axis] = []
    for axis in axes:
        points = [p for p in cuts.get(axis.name, ()) if axis.pre <= p <= axis.end] or [axis.pre, axis.end]
        if any(b % a for a, b in itertools.pairwise(points)):
            out.append(axis)
            continue
        out.extend(Axis(axis.name, a, b // a) for a, b in itertools.pairwise(points))
    return tuple(out)


def union(*lists: Iterable[Axis]) -> Axes:
    """All parts of axes that occur in any of the lists, once each, sorted by name and part."""
    each = [tuple(axes) for axes in lists]
    cuts = atoms(each)
    return merge(sorted({part for axes in each for part in split(axes, cuts)}))


def difference(axes: Iterable[Axis], removed: Iterable[Axis]) -> Axes:
    """The parts of `axes` that are not in `removed`."""
    axes, removed = tuple(axes), tuple(removed)
    return merge(part for part in split(axes, atoms((axes, removed))) if not overlap(part, removed))


def intersection(axes: Iterable[Axis], among: Iterable[Axis]) -> Axes:
    """The parts of `axes` that are in `among`."""
    axes, among = tuple(axes), tuple(among)
    return merge(part for part in split(axes, atoms((axes, among))) if overlap(part, among))


def covers(wide: Sequence[Axis], narrow: Sequence[Axis]) -> bool:
    """Whether every part of `narrow` is in `wide`, in any order."""
    cuts = atoms((wide, narrow))
    return set(split(narrow, cuts)) <= set(split(wide, cuts))


@lru_cache(maxsize=1 << 14)  # a program of thousands of operations has few different arguments
def common_prefix(a: Axes, b: Axes) -> Axes:
    """The longest list of (sub-)axes, from the outermost, on which both lists agree."""
    cuts = atoms((a, b))
    prefix = []
    for left, right in zip(split(a, cuts), split(b, cuts)):
        if left != right:
            break
        prefix.append(left)
    return merge(prefix)


def starts_with(longer: Axes, shorter: Axes) -> bool:
    """Whether `shorter` is a prefix of `longer`."""
    return common_prefix(longer, shorter) == merge(shorter)


@lru_cache(maxsize=1 << 14)
def remainder(longer: Axes, prefix: Axes) -> Axes:
    """The axes of `longer` after its prefix `prefix`."""
    cuts = atoms((longer, prefix))
    return merge(split(longer, cuts)[len(split(prefix, cuts)) :])


@lru_cache(maxsize=1 << 14)
def without(axes: Axes, used: Axes) -> Axes:
    """The longest prefix of `axes` that does not overlap `used`; it may end with the outer part of an axis."""
    if not used or not axes:
        return axes
    prefix = []
    for axis in split(axes, atoms((axes, used))):
        if overlap(axis, used):
            break
        prefix.append(axis)
    return merge(prefix)
