"""The sharding of a value: `Sharding` during propagation (open or closed dims), `Layout` in the program."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from typing import NamedTuple

from tpshard.parallelism.mesh import Axes, Axis, Mesh, merge, size_of

DIM_LETTERS = {
    "batch": "B", "seq": "S", "embed": "E", "heads": "H", "kv_heads": "K", "head_dim": "D", "mlp": "M", "vocab": "V",
    "expert": "X",
}  # fmt: skip
"""The letters of language models' dims in `notation`; a dim with another name keeps it."""

UNNAMED = "IJKLMNOPQR"
"""The letters of dims without a name, in order."""


def notation(cuts: Sequence[str], partial: str = "", names: Sequence[str] = ()) -> str:
    """A sharded tensor in the notation of the scaling book: `[E_fsdp, M_tp]`, with ` {U_dp}` for an unreduced sum.

    cuts: for each dim its axes, outer to inner, joined by `+`; empty for a whole dim. names: the names of the dims, if
    they have any.
    """
    named = len(names) == len(cuts)
    letters = [DIM_LETTERS.get(name, name or "_") for name in names] if named else list(UNNAMED[: len(cuts)])
    letters += [f"d{i}" for i in range(len(letters), len(cuts))]
    inside = ", ".join(letter + (f"_{cut}" if cut else "") for letter, cut in zip(letters, cuts))
    return f"[{inside}]" + (f" {{{partial}}}" if partial else "")


def show_axis(axis: Axis, mesh: Mesh | None = None) -> str:
    """An axis as text: its name, or `x:(pre)size` for a sub-axis."""
    whole = mesh is not None and mesh.axes.get(axis.name) == axis.size and axis.pre == 1
    return axis.name if whole or (mesh is None and axis.pre == 1) else f"{axis.name}:({axis.pre}){axis.size}"


LEGAL = (
    'None (free), a tuple with per dim None, an axis, a sub-axis (name, pre, size), "?" (open) or a tuple of these, '
    'a text such as "[{x,?} {y}] replicated={z}", or a Sharding'
)
"""The forms in which a user may give a sharding."""


@dataclass(frozen=True)
class Sharding:
    """A sharding during propagation: the axes of each dim, outer to inner, and whether more may be added (`open`).

    Annotations are closed, inferred shardings open. `replicated` axes never shard the value. `priority` (per dim, or
    None) delays a dim until its round. Text form: `[{a,?} {b:(1)2}p1] replicated={c} unreduced={d}`.
    """

    dims: tuple[Axes, ...]
    open: tuple[bool, ...]
    replicated: frozenset[Axis] = frozenset()
    priority: tuple[int, ...] | None = None
    unreduced: Axes = ()
    """Axes over which the value is an unreduced sum, such as gradient sums between micro-batches. They shard no dim."""

    @staticmethod
    def unknown(rank: int) -> Sharding:
        """A sharding of a tensor of `rank` dims, without axes and open for propagation."""
        return Sharding(((),) * rank, (True,) * rank)

    @staticmethod
    def of(mesh: Mesh, sharding: object, rank: int) -> Sharding:
        """The sharding in any form that a user may give (see `LEGAL`); omitted trailing dims are replicated.

        Raises ValueError if it does not fit the mesh or a tensor of `rank` dims.
        """
        if isinstance(sharding, Sharding):
            parsed = sharding
        elif isinstance(sharding, str):
            parsed = parse(sharding, mesh)
        elif isinstance(sharding, (tuple, list)):
            dims = [parse_dim(mesh, dim) for dim in sharding]
            parsed = Sharding(tuple(axes for axes, _ in dims), tuple(is_open for _, is_open in dims))
        else:
            raise ValueError(f"{sharding!r} is not a sharding: give {LEGAL}")
        if len(parsed.dims) > rank:
            raise ValueError(
                f"a sharding of {len(parsed.dims)} dims was given for a tensor of {rank} dims: {sharding!r}"
            )
        missing = rank - len(parsed.dims)
        parsed = replace(
            parsed, dims=parsed.dims + ((),) * missing, open=parsed.open + (False,) * missing,
            priority=parsed.priority + (0,) * missing if parsed.priority else None,
        )  # fmt: skip
        check_disjoint((*parsed.dims, tuple(parsed.replicated), parsed.unreduced))
        return parsed

    @property
    def axes(self) -> Axes:
        """All axes that shard a dim, in the order of the dims."""
        return tuple(axis for dim in self.dims for axis in dim)

    @property
    def barred(self) -> Axes:
        """Axes that may not shard any dim: replicated and unreduced ones."""
        return (*self.replicated, *self.unreduced)

    def with_dim(self, dim: int, axes: Axes) -> Sharding:
        """The sharding with other axes on one dim."""
        return replace(self, dims=(*self.dims[:dim], axes, *self.dims[dim + 1 :]))

    def show(self, mesh: Mesh | None = None) -> str:
        parts = []
        for i, (axes, is_open) in enumerate(zip(self.dims, self.open)):
            names = [show_axis(a, mesh) for a in axes] + (["?"] if is_open else [])
            parts.append("{" + ",".join(names) + "}" + (f"p{self.priority[i]}" if self.priority else ""))
        text = "[" + " ".join(parts) + "]"
        for name, axes in (("replicated", tuple(sorted(self.replicated))), ("unreduced", self.unreduced)):
            if axes:
                text += f" {name}=" + "{" + ",".join(show_axis(a, mesh) for a in axes) + "}"
        return text

    __str__ = show

    def notation(self, mesh: Mesh, names: Sequence[str] = ()) -> str:
        """The sharding as text, such as `[E_fsdp?, M]`: `?` marks an open dim, and the axes that may shard no dim
        follow.

        names: the names of the dims.
        """
        joined = ["+".join(show_axis(axis, mesh) for axis in axes) for axes in self.dims]
        cuts = [cut + "?" * is_open for cut, is_open in zip(joined, self.open)]
        partial = "+".join(show_axis(axis, mesh) for axis in self.unreduced)
        excluded = ", ".join(show_axis(axis, mesh) for axis in sorted(self.replicated))
        return notation(cuts, f"U_{partial}" if partial else "", names) + (
            f" replicated over {excluded}" if excluded else ""
        )


def parse_dim(mesh: Mesh, dim: object) -> tuple[Axes, bool]:
    """Parses one dim of a sharding in the form of a tuple: its axes, outer to inner, and whether it is open."""
    if dim is None:
        return (), False
    if isinstance(dim, str) or (isinstance(dim, (tuple, list)) and len(dim) == 3 and isinstance(dim[1], int)):
        dim = (dim,)
    if not isinstance(dim, (tuple, list)):
        raise ValueError(f"{dim!r} is not the sharding of a dim: give {LEGAL}")
    is_open = bool(dim) and dim[-1] == "?"
    for part in dim[: len(dim) - is_open]:
        if not isinstance(part, (str, tuple, list)) or part == "?":
            raise ValueError(f"{part!r} is not a mesh axis in {dim!r}: give {LEGAL}")
    axes = tuple(mesh.axis(part) for part in dim[: len(dim) - is_open])
    check_disjoint((axes,))
    return merge(axes), is_open


def parse(text: str, mesh: Mesh) -> Sharding:
    """Parses the text form, `[{a,?} {b:(1)2@p1}] replicated={c} unreduced={d}`.

    Each dim has a `{}`; `?` stands for an open dim, `x:(pre)size` for a sub-axis, `@p1` (or `p1` after the dim) for a
    priority. Raises ValueError for anything else.
    """

    def refuse(why: str) -> ValueError:
        return ValueError(f'{why} in the sharding {text!r}: give, for example, "[{{x,?}} {{y}}] replicated={{z}}"')

    whole = re.fullmatch(r"\s*\[([^\[\]]*)\]\s*(.*)", text, re.DOTALL)
    if whole is None:
        raise refuse("no `[...]` around all dims")
    dims: list[Axes] = []
    opens: list[bool] = []
    priorities: list[int] = []
    for content, behind in _groups(whole[1], r"\{([^{}]*)\}(?:p(\d+))?", refuse):
        names, at, inside = content.partition("@p")
        if at and (behind or not inside.strip().isdigit()):
            raise refuse(f"`@p{inside}` is no priority")
        listed = [n.strip() for n in names.split(",")] if names.strip() else []
        opens.append(listed[-1:] == ["?"])
        dims.append(_axes(listed[: len(listed) - opens[-1]], mesh, refuse))
        priorities.append(int(inside or behind or 0))
    sets: dict[str, Axes] = {}
    for name, content in _groups(whole[2], r"(replicated|unreduced)\s*=\s*\{([^{}]*)\}", refuse):
        if name in sets:
            raise refuse(f"`{name}` twice")
        sets[name] = _axes([n.strip() for n in content.split(",")] if content.strip() else [], mesh, refuse)
    unreduced = merge(sorted(sets.get("unreduced", ())))
    try:
        check_disjoint((*dims, sets.get("replicated", ()), unreduced))
    except ValueError as error:
        raise refuse(str(error)) from None
    return Sharding(
        tuple(map(merge, dims)), tuple(opens), frozenset(sets.get("replicated", ())),
        tuple(priorities) if any(priorities) else None, unreduced,
    )  # fmt: skip


def _groups(text: str, pattern: str, refuse: Callable[[str], ValueError]) -> Iterator[tuple[str, str]]:
    """Yields the two groups of every match of a pattern; between matches there may be only blanks."""
    at = 0
    for match in re.finditer(pattern, text):
        if text[at : match.start()].strip():
            break
        at = match.end()
        yield match[1], match[2]
    if text[at:].strip():
        raise refuse(f"`{text[at:].strip()}` is not understood")


def _axes(names: Sequence[str], mesh: Mesh, refuse: Callable[[str], ValueError]) -> Axes:
    axes = []
    for name in names:
        match = re.fullmatch(r"([^\s:(){}?]+)(?::\((\d+)\)(\d+))?", name)
        if match is None:
            raise refuse(f"`{name}` is no axis")
        try:
            axes.append(mesh.axis((match[1], int(match[2]), int(match[3])) if match[2] else match[1]))
        except ValueError as error:
            raise refuse(str(error)) from None
    return tuple(axes)


def check_disjoint(dims: Sequence[Axes]) -> None:
    """Raises ValueError if two of these axes overlap."""
    flat = [axis for dim in dims for axis in dim]
    for axis, other in combinations(flat, 2):
        if axis.overlaps(other):
            raise ValueError(f"mesh axis `{axis.name}` is used twice in one tensor")


class Layout(NamedTuple):
    """The placement of a value in a program: the axes of each dim, and those over which it is an unreduced sum."""

    dims: tuple[Axes, ...]
    partial: Axes = ()
    kind: str = "sum"
    grains: tuple[int, ...] = ()
    """For each dim, the number of neighbouring elements that are never separated; empty if that is 1 for all dims.

    It matters only for uneven dims: [4, 128] on 3 devices, viewed as [512], is divided into 256, 256 and 0 elements,
    with a grain of 128; [512] by itself is divided into 171, 171 and 170. `even_grains` gives the normal form.
    """

    @property
    def axes(self) -> Axes:
        """All axes that shard a dim, in the order of the dims."""
        return tuple(axis for dim in self.dims for axis in dim)

    def show(self, mesh: Mesh | None = None) -> str:
        text = "[" + " ".join("{" + ",".join(show_axis(a, mesh) for a in dim) + "}" for dim in self.dims) + "]"
        if self.grains:
            text += " grains=" + ",".join(map(str, self.grains))
        if self.partial:
            text += f" partial_{self.kind}=" + "{" + ",".join(show_axis(a, mesh) for a in self.partial) + "}"
        return text

    def notation(self, mesh: Mesh, names: Sequence[str] = ()) -> str:
        """The layout as text, such as `[E_fsdp, M_tp]`; an unreduced maximum is `{max_tp}`. names: the names of the
        dims.
        """
        cuts = ["+".join(show_axis(axis, mesh) for axis in axes) for axes in self.dims]
        partial = "+".join(show_axis(axis, mesh) for axis in self.partial)
        letter = "U" if self.kind == "sum" else self.kind
        text = notation(cuts, f"{letter}_{partial}" if partial else "", names)
        return text + (f" grains {', '.join(map(str, self.grains))}" if self.grains else "")

    def grain(self, dim: int) -> int:
        return self.grains[dim] if self.grains else 1

    def whole(self) -> Layout:
        """The layout without its unreduced axes."""
        return Layout(self.dims, grains=self.grains)

    def as_sum(self, partial: Axes, kind: str = "sum") -> Layout:
        """The layout as an unreduced sum over `partial`."""
        return Layout(self.dims, partial, kind, self.grains)


def replicated(rank: int) -> Layout:
    return Layout(((),) * rank)


def local_size(size: int, axes: Sequence[Axis], grain: int = 1) -> int:
    """The length of one device's shard of a dim of `size`, padding included.

    Each axis, outer to inner, divides the dim into equal pieces, of which the last is padded at its end. Pieces are
    multiples of `grain`, which divides `size`.
    """
    size //= grain
    for axis in axes:
        size = -(-size // axis.size)
    return size * grain


def lengths(size: int, axes: Sequence[Axis], grain: int = 1) -> list[int]:
    """The length of a dim, and of one device's part of it after each of the axes has divided it (see `local_size`)."""
    return list(accumulate(axes, lambda part, axis: local_size(part, (axis,), grain), initial=size))


def local_shape(shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    if not layout.grains:
        return tuple(local_size(n, axes) for n, axes in zip(shape, layout.dims))
    return tuple(local_size(n, axes, g) for n, axes, g in zip(shape, layout.dims, layout.grains))


def even_grains(shape: Sequence[int], dims: Sequence[Axes], grains: Sequence[int]) -> tuple[int, ...]:
    """`Layout.grains` in normal form: 1 where the grains are divided evenly, empty if all are 1."""
    out = tuple(1 if not axes or even(n // g, axes) else g for n, axes, g in zip(shape, dims, grains))
    return out if any(g > 1 for g in out) else ()


def refines(size: int, fine: Axes, coarse: Axes) -> bool:
    """Whether `fine` divides a dim at all places where `coarse` does; both merged, `coarse` the major part.

    True for whole axes, since each axis divides the padded pieces of those before it. A part of an axis divides padded
    pieces elsewhere than the whole axis: 10 over x:(1)2 at 0 and 5, over x of 4 at 0, 3, 6 and 9.
    """
    if fine[: len(coarse)] == coarse:
        return True
    last, whole = coarse[-1], fine[len(coarse) - 1]
    if fine[: len(coarse) - 1] != coarse[:-1] or last.name != whole.name or last.pre != whole.pre:
        return False
    pieces = whole.size // last.size
    return local_size(size, coarse) == pieces * local_size(size, fine[: len(coarse)])


def starts(size: int, axes: Axes) -> tuple[int, ...]:
    """The first element of every piece of a dim, in the order of the pieces."""
    places: tuple[int, ...] = (0,)
    for axis, part in zip(axes, lengths(size, axes)[1:]):
        places = tuple(place + i * part for place in places for i in range(axis.size))
    return places


def spans(size: int, axes: Sequence[Axis], grain: int = 1) -> tuple[tuple[int, int], ...]:
    """The first element of every device's shard of a dim, and the one behind its last, without padding."""
    out: tuple[tuple[int, int], ...] = ((0, size),)
    for axis, part in zip(axes, lengths(size, axes, grain)[1:]):
        out = tuple(
            (min(first + i * part, end), min(first + (i + 1) * part, end))
            for first, end in out for i in range(axis.size)
        )  # fmt: skip
    return out


def even(size: int, axes: Sequence[Axis]) -> bool:
    """Whether the axes divide a dim of `size` evenly."""
    return size % size_of(axes) == 0


def padded_behind(size: int, axes: Axes) -> bool:
    """Whether all padding of a dim of `size` lies behind its last element, as that of a single axis does."""
    part = local_size(size, axes)
    return even(size, axes) or starts(size, axes) == tuple(range(0, part * size_of(axes), part))


def local_bytes(shape: Sequence[int], layout: Layout, itemsize: int) -> int:
    return math.prod(local_shape(shape, layout)) * itemsize
