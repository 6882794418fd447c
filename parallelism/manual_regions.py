"""Manual regions: code that sees one device's part and calls collectives itself, amid what is spread automatically.

    @manual(mesh, "x", [("x",), None], [None])
    def loss(rows, weight):  # rows: this device's part of dim 0
        return psum((rows @ weight).square().sum(), "x")

A region is a function mapped over its axes: for the rest of the graph a value that differs along an axis has one dim
more, which lies on that axis, a part on each device, and a collective is what it is arithmetically along that dim: a
sum, a transposition, a shift. So gradients follow by themselves, other axes are propagated inside as outside, and
outside of `partition` a region computes the same on one device. (The calls are those of JAX's `shard_map`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch as layers
from torch.utils import _pytree as pytree
from tpshard.parallelism.annotate import OPEN, split_as
from tpshard.parallelism.mesh import Mesh

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class _Region:
    mesh: Mesh
    axes: tuple[str, ...]
    """Outer to inner, each one level of mapping."""
    levels: dict[str, int] = field(default_factory=dict)
    places: dict[str, Tensor] = field(default_factory=dict)
    """By axis: this device's index."""


_entered: list[_Region] = []
"""The region that is being traced, if one is."""


def manual(
    mesh: Mesh, axes: str | Sequence[str], in_shardings: Sequence[Any], out_shardings: Sequence[Any]
) -> Callable[[F], F]:
    """Makes a function of one device's parts a function of whole tensors.

    `in_shardings` and `out_shardings` have an entry per tensor, in the order of the flattened arguments or results:
    None or a tuple, with per dim None, one of `axes` or a tuple of them, outer to inner. A dim that names axes is cut
    evenly over them; dims that name none are left to propagation, over the mesh's other axes. A tensor that does not
    name one of `axes` is the same on all devices along it; ValueError for a result that is not (see `psum`), for a size
    that does not divide, and for another axis. Tensors that the function closes over are whole.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    for name in names:
        if name not in mesh.axes:
            raise ValueError(f"{mesh} has no axis `{name}`")
    if not names or len(set(names)) != len(names):
        raise ValueError(f"a manual region takes one or more different axes, not {axes!r}")
    entries = {
        side: [_entry(given, names, f"{side}_shardings[{i}]") for i, given in enumerate(shardings)]
        for side, shardings in (("in", in_shardings), ("out", out_shardings))
    }

    def decorate(fn: F) -> F:
        @wraps(fn)
        def whole(*args: Any, **kwargs: Any) -> Any:
            if _entered:
                raise ValueError(f"the manual region `{fn.__name__}` is called inside of another")
            leaves, tree = pytree.tree_flatten((args, kwargs))
            where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            _count(len(where), entries["in"], "in", "tensor arguments", fn)
            region = _Region(mesh, names)
            out_tree: list[Any] = []

            def on_parts(*parts: Tensor) -> tuple[Tensor, ...]:
                full = list(leaves)
                for i, part in zip(where, parts):
                    full[i] = part
                given, named = pytree.tree_unflatten(full, tree)
                results, found = pytree.tree_flatten(fn(*given, **named))
                out_tree.append(found)
                _count(len(results), entries["out"], "out", "results", fn)
                _check_results(results, entries["out"], region, fn)
                return tuple(results)

            with _inside(region):
                parts = [_cut(leaves[i], entry, region, n) for n, (i, entry) in enumerate(zip(where, entries["in"]))]
                made = _mapped(on_parts, region, entries["in"], entries["out"], parts)
            results = [_joined(one, entry, region) for one, entry in zip(made, entries["out"])]
            return pytree.tree_unflatten(results, out_tree[-1])

        return whole  # type: ignore[return-value]

    return decorate


# ---- what a region's function calls ----------------------------------------------------------------------------------
def axis_index(axis: str) -> Tensor:
    """This device's index along an axis, an int64 scalar."""
    return _region(axis).places[axis]


def axis_size(axis: str) -> int:
    """Devices along an axis."""
    return _region(axis).mesh.axes[axis]


def psum(x: Tensor, axis: str | Sequence[str]) -> Tensor:
    """The sum over the devices along an axis, or several; the same on all of them."""
    for name in (axis,) if isinstance(axis, str) else axis:
        x = _over(x, name, lambda whole, dim: whole.sum(dim), lambda same, n: same * n)
    return x


def pmax(x: Tensor, axis: str) -> Tensor:
    """The largest over the devices along an axis, element by element."""
    return _over(x, axis, lambda whole, dim: whole.amax(dim), lambda same, n: same)


def all_gather(x: Tensor, axis: str, dim: int = 0) -> Tensor:
    """The parts of all devices along an axis, joined along `dim` in their order."""
    whole, held = _opened(_spread(x, axis))
    at = held.index(axis)
    dim = _dim(dim, x)
    to = len(held) - 1 + dim
    whole = whole.movedim(at, to).flatten(to, to + 1)
    held.remove(axis)
    return _closed(_anchored(whole, held, dim), held)


def reduce_scatter(x: Tensor, axis: str, dim: int = 0) -> Tensor:
    """The sum over the devices along an axis, of which each keeps its part of `dim`."""
    dim, n = _dim(dim, x), axis_size(axis)
    _divides(x, dim, n, "reduce_scatter", axis)
    whole, held = _opened(_spread(x, axis))
    at = held.index(axis)
    parts = whole.sum(at).unflatten(len(held) - 1 + dim, (n, -1)).movedim(len(held) - 1 + dim, at)
    return _closed(_anchored(parts, held), held)


def all_to_all(x: Tensor, axis: str, split_dim: int, concat_dim: int) -> Tensor:
    """Every device cuts `split_dim`, sends a part to each along an axis, and joins what comes along `concat_dim`."""
    split_dim, concat_dim, n = _dim(split_dim, x), _dim(concat_dim, x), axis_size(axis)
    _divides(x, split_dim, n, "all_to_all", axis)
    whole, held = _opened(_spread(x, axis))
    at, base = held.index(axis), len(held)
    whole = whole.unflatten(base + split_dim, (n, -1))
    # [.., from, .., to, part, ..]: `to` takes the place of `from`, which goes before the dim that is joined
    order = [d for d in range(whole.dim()) if d not in (at, base + split_dim)]
    order.insert(at, base + split_dim)
    joined = base + concat_dim + (1 if concat_dim >= split_dim else 0)
    order.insert(order.index(joined), at)
    whole = whole.permute(order)
    place = order.index(at)
    return _closed(_anchored(whole.flatten(place, place + 1), held), held)


def permute(x: Tensor, axis: str, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """Sends from device to device along an axis, by pairs (from, to); zeros where nothing is sent to.

    Pairs that are equally far apart travel together, one permute for each distance.
    """
    n = axis_size(axis)
    sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
    if any(not 0 <= i < n for i in sources + targets) or any(len(set(e)) < len(e) for e in (sources, targets)):
        raise ValueError(f"`permute` over `{axis}` of {n} sends from each device, and to each, at most once: {pairs}")
    whole, held = _opened(_spread(x, axis))
    at = held.index(axis)
    made: Tensor | None = None
    for shift in sorted({(b - a) % n for a, b in pairs}):
        sent = whole if shift == 0 else _anchored(torch.roll(whole, shift, at), held)
        mine = [b for a, b in pairs if (b - a) % n == shift]
        if len(mine) < n:
            taken = torch.zeros(n, dtype=torch.bool)
            for b in mine:
                taken = taken | (torch.arange(n) == b)
            taken = taken.view([n if d == at else 1 for d in range(whole.dim())])
            sent = torch.where(taken, sent, torch.zeros((), dtype=x.dtype))
        made = sent if made is None else made + sent
    return _closed(torch.zeros_like(whole) if made is None else made, held)


# ---- between a region's parts and whole tensors ----------------------------------------------------------------------
Entry = tuple[tuple[str, ...], ...]
"""Per dim the region's axes that cut it."""


def _entry(given: Any, names: Sequence[str], what: str) -> Entry:
    if given is not None and not isinstance(given, (tuple, list)):
        raise ValueError(f"{what} = {given!r}: give None, or a tuple with per dim None, an axis, or a tuple of axes")
    entry = tuple(() if dim is None else (dim,) if isinstance(dim, str) else tuple(dim) for dim in given or ())
    flat = [axis for dim in entry for axis in dim]
    for axis in flat:
        if axis not in names:
            raise ValueError(f"{what} names `{axis}`, which is no axis of the manual region ({', '.join(names)})")
    if len(set(flat)) != len(flat):
        raise ValueError(f"{what} names an axis twice: {given!r}")
    return entry


def _axes(entry: Entry, region: _Region) -> list[str]:
    """Of a tensor, in the region's order."""
    return [axis for axis in region.axes if any(axis in dim for dim in entry)]


def _count(found: int, entries: Sequence[Entry], side: str, what: str, fn: Callable[..., Any]) -> None:
    if found != len(entries):
        raise ValueError(f"{side}_shardings of `{fn.__name__}` has {len(entries)} entries for {found} {what}")


def _cut(x: Tensor, entry: Entry, region: _Region, number: int) -> Tensor:
    """A whole tensor as [devices along each of its axes..., one device's part]."""
    if len(entry) > x.dim():
        raise ValueError(f"in_shardings[{number}] has {len(entry)} entries for a tensor of {x.dim()} dims")
    names = _axes(entry, region)
    order: list[int] = []
    front: dict[str, int] = {}
    for d in range(x.dim() - 1, -1, -1):
        axes = entry[d] if d < len(entry) else ()
        sizes = [region.mesh.axes[axis] for axis in axes]
        count = 1
        for size in sizes:
            count *= size
        if x.shape[d] % count:
            raise ValueError(
                f"in_shardings[{number}]: dim {d} of {list(x.shape)} does not divide over {', '.join(axes)} ({count})"
            )
        if axes:
            x = x.unflatten(d, (*sizes, -1))
    at = 0
    for axes in (*entry, *[()] * (x.dim())):
        for axis in axes:
            front[axis] = at
            at += 1
        if at < x.dim():
            order.append(at)
            at += 1
    x = x.permute([*(front[axis] for axis in names), *order]) if names else x
    return _anchored(x, names, region=region)


def _joined(x: Tensor, entry: Entry, region: _Region) -> Tensor:
    """Inverse of `_cut`."""
    names = _axes(entry, region)
    if not names:
        return x
    x = _anchored(x, names, region=region)
    order: list[int] = []
    rank = x.dim() - len(names)
    for d in range(rank):
        order += [names.index(axis) for axis in (entry[d] if d < len(entry) else ())] + [len(names) + d]
    x = x.permute(order)
    for d in range(rank):
        count = len(entry[d]) if d < len(entry) else 0
        if count:
            x = x.flatten(d, d + count)
    return x


def _anchored(x: Tensor, held: Sequence[str], whole: int | None = None, region: _Region | None = None) -> Tensor:
    """Annotates that each leading dim lies on its axis, and that dim `whole` of the part is whole."""
    mesh = (region or _entered[-1]).mesh
    mapping = [list(mesh.axes).index(axis) for axis in held] + [OPEN] * (x.dim() - len(held))
    if whole is not None:
        mapping[len(held) + whole] = -1
    return split_as(x, mesh, mapping)


def _mapped(
    fn: Callable[..., tuple[Tensor, ...]], region: _Region, ins: Sequence[Entry], outs: Sequence[Entry],
    parts: Sequence[Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    """`fn` mapped over the region's axes, the outermost first."""

    def level(number: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if number == len(region.axes):
            return fn(*tensors)
        axis = region.axes[number]

        def inner(place: Tensor, *mine: Tensor) -> tuple[Tensor, ...]:
            region.levels[axis], region.places[axis] = layers.maybe_get_level(place), place
            return level(number + 1, mine)

        along = [0 if any(axis in dim for dim in entry) else None for entry in ins]
        back = tuple(0 if any(axis in dim for dim in entry) else None for entry in outs)
        places = _anchored(torch.arange(region.mesh.axes[axis]), [axis], region=region)
        mapped = torch.vmap(inner, in_dims=(0, *along), out_dims=back, randomness="different")  # type: ignore[arg-type]
        made: tuple[Tensor, ...] = mapped(places, *tensors)
        return made

    return level(0, parts)


def _check_results(results: Sequence[Any], outs: Sequence[Entry], region: _Region, fn: Callable[..., Any]) -> None:
    for i, (result, entry) in enumerate(zip(results, outs)):
        if not isinstance(result, Tensor):
            raise ValueError(f"result {i} of the manual region `{fn.__name__}` is no tensor")
        if len(entry) > result.dim():
            raise ValueError(f"out_shardings[{i}] has {len(entry)} entries for a result of {result.dim()} dims")
        _, held = _opened(result)
        for axis in held:
            if not any(axis in dim for dim in entry):
                raise ValueError(
                    f"result {i} of the manual region `{fn.__name__}` differs along `{axis}`, which out_shardings[{i}] "
                    f"does not name: name it, or make the result the same everywhere (`psum`, `all_gather`)"
                )


@contextmanager
def _inside(region: _Region) -> Iterator[None]:
    _entered.append(region)
    try:
        yield
    finally:
        _entered.pop()


def _region(axis: str) -> _Region:
    if not _entered or axis not in _entered[-1].axes:
        known = f"it is one over {', '.join(_entered[-1].axes)}" if _entered else "there is none"
        raise ValueError(f"a collective over `{axis}` is called outside of a manual region over it: {known}")
    return _entered[-1]


def _opened(x: Tensor) -> tuple[Tensor, list[str]]:
    """The tensor of all devices, [devices along each axis that it differs along..., part], and those axes."""
    region = _entered[-1]
    by_level = {level: axis for axis, level in region.levels.items()}
    held: list[str] = []
    while layers.is_batchedtensor(x) and layers.maybe_get_level(x) in by_level:
        axis, dim = by_level[layers.maybe_get_level(x)], layers.maybe_get_bdim(x)
        x = layers.get_unwrapped(x).movedim(dim, 0)
        held.insert(0, axis)
    return x, held


def _closed(x: Tensor, held: Sequence[str]) -> Tensor:
    """Inverse of `_opened`."""
    for axis in held:
        x = layers._add_batch_dim(x, 0, _entered[-1].levels[axis])
    return x


def _spread(x: Tensor, axis: str) -> Tensor:
    """The same value, as one that differs along the axis."""
    region = _region(axis)
    whole, held = _opened(x)
    if axis in held:
        return x
    held = [name for name in region.axes if name in (*held, axis)]
    at = held.index(axis)
    return _closed(whole.unsqueeze(at).expand(*whole.shape[:at], axis_size(axis), *whole.shape[at:]), held)


def _over(
    x: Tensor, axis: str, reduce: Callable[[Tensor, int], Tensor], same: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """A reduction along an axis; `same` is what it comes to where all devices have the same."""
    _region(axis)
    whole, held = _opened(x)
    if axis not in held:
        return same(x, axis_size(axis))
    at = held.index(axis)
    held.remove(axis)
    return _closed(_anchored(reduce(whole, at), held), held)


def _dim(dim: int, x: Tensor) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"a tensor of {x.dim()} dims has no dim {dim}")
    return dim % x.dim()


def _divides(x: Tensor, dim: int, n: int, what: str, axis: str) -> None:
    if x.shape[dim] % n:
        raise ValueError(f"`{what}`: dim {dim} of {list(x.shape)} does not divide over `{axis}` ({n})")


__all__ = [
    "all_gather", "all_to_all", "axis_index", "axis_size", "manual", "permute", "pmax", "psum", "reduce_scatter",
]  # fmt: skip
