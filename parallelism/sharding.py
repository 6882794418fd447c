"""How a value is spread: `Sharding` while propagating (open or closed dims), `Layout` once it is placed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tpshard.parallelism.mesh import Axes, Axis, Mesh, merge, size_of


def show_axis(axis: Axis, mesh: Mesh | None = None) -> str:
    whole = mesh is not None and mesh.axes.get(axis.name) == axis.size and axis.pre == 1
    return axis.name if whole or (mesh is None and axis.pre == 1) else f"{axis.name}:({axis.pre}){axis.size}"


@dataclass(frozen=True)
class Sharding:
    """Per dim a list of axes, outer to inner, and whether propagation may extend it (`open`).

    What the user writes is closed, what is inferred is open. `replicated` axes may never shard the value; `priority`
    (per dim, or None) parks a dim until its round. Text form: `[{a,?} {b:(1)2}p1] replicated={c}`.
    """

    dims: tuple[Axes, ...]
    open: tuple[bool, ...]
    replicated: frozenset[Axis] = frozenset()
    priority: tuple[int, ...] | None = None
    unreduced: Axes = ()
    """Axes over which an input or output is a sum still to be made: gradient sums between micro-batches."""

    @staticmethod
    def unknown(rank: int) -> Sharding:
        return Sharding(((),) * rank, (True,) * rank)

    @staticmethod
    def of(mesh: Mesh, dims: Sequence[object], rank: int, *, open: bool = False) -> Sharding:
        """From the public form: per dim None, an axis, or a tuple of axes; dims left out at the end are replicated."""
        if len(dims) > rank:
            raise ValueError(f"a sharding of {len(dims)} dims was given for a tensor of {rank} dims: {tuple(dims)!r}")
        out = tuple(parse_dim(mesh, dim) for dim in dims) + ((),) * (rank - len(dims))
        check_disjoint(out)
        return Sharding(out, (open,) * rank)

    @property
    def axes(self) -> Axes:
        return tuple(axis for dim in self.dims for axis in dim)

    def with_dim(self, dim: int, axes: Axes) -> Sharding:
        return replace(self, dims=(*self.dims[:dim], axes, *self.dims[dim + 1 :]))

    def show(self, mesh: Mesh | None = None) -> str:
        parts = []
        for i, (axes, is_open) in enumerate(zip(self.dims, self.open)):
            names = [show_axis(a, mesh) for a in axes] + (["?"] if is_open else [])
            parts.append("{" + ",".join(names) + "}" + (f"p{self.priority[i]}" if self.priority else ""))
        tail = ""
        if self.replicated:
            tail = " replicated={" + ",".join(sorted(show_axis(a, mesh) for a in self.replicated)) + "}"
        return "[" + " ".join(parts) + "]" + tail

    __str__ = show


def parse_dim(mesh: Mesh, dim: object) -> Axes:
    """None, an axis name, a sub-axis (name, pre, size), or a sequence of these -> axes, outer to inner."""
    if dim is None:
        return ()
    if isinstance(dim, str) or (isinstance(dim, (tuple, list)) and len(dim) == 3 and isinstance(dim[1], int)):
        return merge((mesh.axis(dim),))
    if not isinstance(dim, (tuple, list)):
        raise ValueError(f"a dim is None, an axis or a tuple of axes, not {dim!r}")
    return merge(mesh.axis(part) for part in dim)


def parse(text: str, mesh: Mesh) -> Sharding:
    """Reads the text form, `[{a,?} {b:(1)2@p1}] replicated={c}`. ValueError names what is wrong."""
    body = re.match(r"\s*\[(.*?)\]\s*(?:replicated=\{(.*?)\})?", text)
    if not body:
        raise ValueError(f"not a sharding: {text!r}")
    dims: list[Axes] = []
    opens: list[bool] = []
    priorities: list[int] = []
    for content, outside in re.findall(r"\{(.*?)\}(?:p(\d+))?", body[1]):
        inner, _, inside = content.partition("@p")
        names = [n.strip() for n in inner.split(",") if n.strip()]
        opens.append("?" in names)
        dims.append(merge(parse_axis(n, mesh) for n in names if n != "?"))
        priorities.append(int(inside or outside or 0))
    replicated = frozenset(parse_axis(n.strip(), mesh) for n in (body[2] or "").split(",") if n.strip())
    return Sharding(tuple(dims), tuple(opens), replicated, tuple(priorities) if any(priorities) else None)


def parse_axis(text: str, mesh: Mesh) -> Axis:
    name, _, part = text.partition(":")
    found = re.fullmatch(r"\((\d+)\)(\d+)", part) if part else None
    return mesh.axis((name, int(found[1]), int(found[2])) if found else name)


def check_disjoint(dims: Sequence[Axes]) -> None:
    flat = [axis for dim in dims for axis in dim]
    for i, axis in enumerate(flat):
        for other in flat[i + 1 :]:
            if axis.overlaps(other):
                raise ValueError(f"mesh axis `{axis.name}` is used twice in one tensor")


class Layout(NamedTuple):
    """Where the parts of a value lie: axes per dim, and the axes over which it is an unreduced sum (or maximum)."""

    dims: tuple[Axes, ...]
    partial: Axes = ()
    kind: str = "sum"

    @property
    def axes(self) -> Axes:
        return tuple(axis for dim in self.dims for axis in dim)

    def show(self, mesh: Mesh | None = None) -> str:
        text = "[" + " ".join("{" + ",".join(show_axis(a, mesh) for a in dim) + "}" for dim in self.dims) + "]"
        if self.partial:
            text += f" partial_{self.kind}=" + "{" + ",".join(show_axis(a, mesh) for a in self.partial) + "}"
        return text

    def whole(self) -> Layout:
        """The same without its unreduced axes."""
        return Layout(self.dims)


def replicated(rank: int) -> Layout:
    return Layout(((),) * rank)


def local_size(size: int, axes: Sequence[Axis]) -> int:
    """Length of one device's part of a dim: each axis, outer to inner, cuts into equal pieces, the last one padded."""
    for axis in axes:
        size = -(-size // axis.size)
    return size


def local_shape(shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    return tuple(local_size(n, axes) for n, axes in zip(shape, layout.dims))


def even(size: int, axes: Sequence[Axis]) -> bool:
    return size % size_of(axes) == 0


def is_even(shape: Sequence[int], layout: Layout) -> bool:
    return all(even(n, axes) for n, axes in zip(shape, layout.dims))


def local_bytes(shape: Sequence[int], layout: Layout, itemsize: int) -> int:
    return math.prod(local_shape(shape, layout)) * itemsize
