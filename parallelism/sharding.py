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
    grains: tuple[int, ...] = ()
    """Per dim the number of neighbouring elements that no cut separates; empty where that is 1 for every dim.

    It matters for uneven dims alone: [4, 128] on 3 devices, viewed as [512], is cut into 256, 256 and 0 elements,
    a grain of 128, where [512] by itself is cut into 171, 171 and 170. `even_grains` brings it to its normal form.
    """

    @property
    def axes(self) -> Axes:
        return tuple(axis for dim in self.dims for axis in dim)

    def show(self, mesh: Mesh | None = None) -> str:
        text = "[" + " ".join("{" + ",".join(show_axis(a, mesh) for a in dim) + "}" for dim in self.dims) + "]"
        if self.grains:
            text += " grains=" + ",".join(map(str, self.grains))
        if self.partial:
            text += f" partial_{self.kind}=" + "{" + ",".join(show_axis(a, mesh) for a in self.partial) + "}"
        return text

    def grain(self, dim: int) -> int:
        return self.grains[dim] if self.grains else 1

    def whole(self) -> Layout:
        """The same without its unreduced axes."""
        return Layout(self.dims, grains=self.grains)

    def summed(self, partial: Axes, kind: str = "sum") -> Layout:
        """The same as an unreduced sum over `partial`."""
        return Layout(self.dims, partial, kind, self.grains)


def replicated(rank: int) -> Layout:
    return Layout(((),) * rank)


def local_size(size: int, axes: Sequence[Axis], grain: int = 1) -> int:
    """Length of one device's part of a dim: each axis, outer to inner, cuts into equal pieces, the last one padded.

    Pieces are multiples of `grain`, which divides `size`. On every device the elements that are not padding come first.
    """
    size //= grain
    for axis in axes:
        size = -(-size // axis.size)
    return size * grain


def local_shape(shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    if not layout.grains:
        return tuple(local_size(n, axes) for n, axes in zip(shape, layout.dims))
    return tuple(local_size(n, axes, g) for n, axes, g in zip(shape, layout.dims, layout.grains))


def even_grains(shape: Sequence[int], dims: Sequence[Axes], grains: Sequence[int]) -> tuple[int, ...]:
    """`Layout.grains` in normal form: 1 wherever the grains are cut evenly, empty where all are 1."""
    out = tuple(
        1 if not axes or even(n // g, axes) else g for n, axes, g in zip(shape, dims, grains)
    )
    return out if any(g > 1 for g in out) else ()


def refines(size: int, fine: Axes, coarse: Axes) -> bool:
    """Whether cutting a dim over `fine` only cuts the pieces of `coarse` further; both merged, `coarse` the major part.

    True for whole axes, since each axis cuts the padded pieces of those before it; a part of an axis cuts elsewhere
    than the whole axis where pieces are padded: 10 over x:(1)2 begins at 0 and 5, over x of 4 at 0, 3, 6 and 9.
    """
    if fine[: len(coarse)] == coarse:
        return True
    last, whole = coarse[-1], fine[len(coarse) - 1]
    if fine[: len(coarse) - 1] != coarse[:-1] or last.name != whole.name or last.pre != whole.pre:
        return False
    pieces = whole.size // last.size
    return local_size(size, coarse) == pieces * local_size(size, fine[: len(coarse)])


def even(size: int, axes: Sequence[Axis]) -> bool:
    return size % size_of(axes) == 0


def is_even(shape: Sequence[int], layout: Layout) -> bool:
    return all(even(n, axes) for n, axes in zip(shape, layout.dims))


def local_bytes(shape: Sequence[int], layout: Layout, itemsize: int) -> int:
    return math.prod(local_shape(shape, layout)) * itemsize
