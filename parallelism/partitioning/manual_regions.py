"""Manual regions: functions that see one device's part of their tensors and call collectives themselves.

    @manual(mesh, "x", [("x",), None], [None])
    def loss(rows, weight):  # rows: this device's part of dim 0
        return psum((rows @ weight).square().sum(), "x")

They may be called in a function whose other tensors are partitioned automatically. A region is mapped over its axes
(`torch.vmap`). In the global graph, a value that differs along an axis has one more dim, which is sharded over that
axis, and a collective is plain arithmetic along that dim: a sum, a transposition, a shift. Therefore gradients need
nothing else, other axes propagate through a region as elsewhere, and without `partition` a region computes the same on
one device. The functions are named as those of JAX's `shard_map`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch as layers
from torch.utils import _pytree as pytree
from tpshard.parallelism.annotate import split_as
from tpshard.parallelism.mesh import Mesh, require_mesh
from tpshard.parallelism.sharding import Sharding

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class _Region:
    """The state of one call of a manual region while it is traced: axes, their `vmap` levels, this device's indices."""

    mesh: Mesh
    axes: tuple[str, ...]
    """The axes it is mapped over, outer to inner."""
    levels: dict[str, int] = field(default_factory=dict)
    """For each axis, the level of its `vmap`."""
    places: dict[str, Tensor] = field(default_factory=dict)
    """For each axis, this device's index."""


_current: ContextVar[_Region | None] = ContextVar("manual region", default=None)


def manual(
    mesh: Mesh, axes: str | Sequence[str], in_shardings: Sequence[Any], out_shardings: Sequence[Any]
) -> Callable[[F], F]:
    """A decorator that turns a function of one device's parts into a function of whole tensors.

    `in_shardings` and `out_shardings` have an entry per tensor, in the order of the flattened arguments or results:
    None or a tuple, with per dim None, one of `axes`, or a tuple of them, outer to inner. A dim with axes is divided
    evenly over them; propagation may shard the other dims over the mesh's other axes. A tensor whose entry lacks one of
    `axes` is the same on all devices along that axis. Tensors that the function closes over are whole. Raises
    ValueError for an unknown axis, a dim that the axes do not divide, or a result that differs along an axis that its
    entry lacks (see `psum`).
    """
    require_mesh(mesh)
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    for name in names:
        if name not in mesh.axes:
            raise ValueError(f"{mesh} has no axis `{name}`")
    if not names or len(set(names)) != len(names):
        raise ValueError(f"a manual region takes one or more different axes, not {axes!r}")
    entries = {
        side: [_entry(sharding, names, f"{side}_shardings[{i}]") for i, sharding in enumerate(shardings)]
        for side, shardings in (("in", in_shardings), ("out", out_shardings))
    }

    def decorate(fn: F) -> F:
        @wraps(fn)
        def whole(*args: Any, **kwargs: Any) -> Any:
            if _current.get() is not None:
                raise ValueError(f"the manual region `{fn.__name__}` is called inside of another")
            leaves, tree = pytree.tree_flatten((args, kwargs))
            where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            _check_count(len(where), entries["in"], "in", "tensor arguments", fn)
            region = _Region(mesh, names)
            out_tree: list[Any] = []

            def on_parts(*parts: Tensor) -> tuple[Tensor, ...]:
                full = list(leaves)
                for i, part in zip(where, parts):
                    full[i] = part
                positionaling, named = pytree.tree_unflatten(full, tree)
                results, result_tree = pytree.tree_flatten(fn(*positionaling, **named))
                out_tree.append(result_tree)
                _check_count(len(results), entries["out"], "out", "results", fn)
                _check_results(results, entries["out"], fn)
                return tuple(results)

            with _entering(region):
                parts = [_cut(leaves[i], entry, region, n) for n, (i, entry) in enumerate(zip(where, entries["in"]))]
                local_results = _map_over_axes(on_parts, region, entries["in"], entries["out"], parts)
            results = [_join(one, entry, region) for one, entry in zip(local_results, entries["out"])]
            return pytree.tree_unflatten(results, out_tree[-1])

        return whole  # type: ignore[return-value]

    return decorate


# ---- what a region's function calls ----------------------------------------------------------------------------------
def axis_index(axis: str) -> Tensor:
    """This device's index along an axis, as an int64 scalar tensor."""
    return _region(axis).places[axis]


def axis_size(axis: str) -> int:
    """The number of devices along an axis."""
    return _region(axis).mesh.axes[axis]


def psum(x: Tensor, axis: str | Sequence[str]) -> Tensor:
    """Sums a tensor over the devices along one or several axes; all of them get the sum."""
    for name in (axis,) if isinstance(axis, str) else axis:
        x = _reduce_along(x, name, lambda whole, dim: whole.sum(dim), lambda same, n: same * n)
    return x


def pmax(x: Tensor, axis: str) -> Tensor:
    """Computes the elementwise maximum of a tensor over the devices along an axis; all of them get it."""
    return _reduce_along(x, axis, lambda whole, dim: whole.amax(dim), lambda same, n: same)


def all_gather(x: Tensor, axis: str, dim: int = 0) -> Tensor:
    """Concatenates the parts of all devices along an axis, in their order, along `dim`."""
    whole, held = _unwrap(_vary_along(x, axis))
    at = held.index(axis)
    dim = _dim(dim, x)
    to = len(held) - 1 + dim
    whole = whole.movedim(at, to).flatten(to, to + 1)
    held.remove(axis)
    return _wrap(_anchor(whole, held, dim), held)


def reduce_scatter(x: Tensor, axis: str, dim: int = 0) -> Tensor:
    """Sums a tensor over the devices along an axis; each keeps its part of `dim`."""
    dim, n = _dim(dim, x), axis_size(axis)
    _check_divides(x, dim, n, "reduce_scatter", axis)
    whole, held = _unwrap(_vary_along(x, axis))
    at = held.index(axis)
    parts = whole.sum(at).unflatten(len(held) - 1 + dim, (n, -1)).movedim(len(held) - 1 + dim, at)
    return _wrap(_anchor(parts, held), held)


def all_to_all(x: Tensor, axis: str, split_dim: int, concat_dim: int) -> Tensor:
    """Splits `split_dim` over the devices along an axis, and concatenates the parts they receive along `concat_dim`."""
    split_dim, concat_dim, n = _dim(split_dim, x), _dim(concat_dim, x), axis_size(axis)
    _check_divides(x, split_dim, n, "all_to_all", axis)
    whole, held = _unwrap(_vary_along(x, axis))
    at, base = held.index(axis), len(held)
    whole = whole.unflatten(base + split_dim, (n, -1))
    # dims are [.., sender, .., receiver, part, ..]: the receiver takes the place of the sender, which moves to
    # `concat_dim`
    order = [d for d in range(whole.dim()) if d not in (at, base + split_dim)]
    order.insert(at, base + split_dim)
    joined = base + concat_dim + (1 if concat_dim >= split_dim else 0)
    order.insert(order.index(joined), at)
    whole = whole.permute(order)
    place = order.index(at)
    return _wrap(_anchor(whole.flatten(place, place + 1), held), held)


def permute(x: Tensor, axis: str, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """Sends the part of one device to another along an axis, for each pair (from, to); other devices receive zeros.

    Pairs with the same distance share one permute.
    """
    n = axis_size(axis)
    sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
    if any(not 0 <= i < n for i in sources + targets) or any(len(set(e)) < len(e) for e in (sources, targets)):
        raise ValueError(f"`permute` over `{axis}` of {n} sends from each device, and to each, at most once: {pairs}")
    whole, held = _unwrap(_vary_along(x, axis))
    at = held.index(axis)
    total: Tensor | None = None
    for shift in sorted({(b - a) % n for a, b in pairs}):
        rolled = whole if shift == 0 else _anchor(torch.roll(whole, shift, at), held)
        receivers = [b for a, b in pairs if (b - a) % n == shift]
        if len(receivers) < n:
            receives = torch.zeros(n, dtype=torch.bool)
            for b in receivers:
                receives = receives | (torch.arange(n) == b)
            receives = receives.view([n if d == at else 1 for d in range(whole.dim())])
            rolled = torch.where(receives, rolled, torch.zeros((), dtype=x.dtype))
        total = rolled if total is None else total + rolled
    return _wrap(torch.zeros_like(whole) if total is None else total, held)


# ---- between a region's parts and whole tensors ----------------------------------------------------------------------
Entry = tuple[tuple[str, ...], ...]
"""For each dim, the region's axes that shard it."""


def _entry(sharding: Any, names: Sequence[str], what: str) -> Entry:
    """Checks one entry of `in_shardings` or `out_shardings`; `what` is its name in errors."""
    if sharding is not None and not isinstance(sharding, (tuple, list)):
        raise ValueError(f"{what} = {sharding!r}: give None, or a tuple with per dim None, an axis, or a tuple of axes")
    entry = tuple(() if dim is None else (dim,) if isinstance(dim, str) else tuple(dim) for dim in sharding or ())
    flat = [axis for dim in entry for axis in dim]
    for axis in flat:
        if axis not in names:
            raise ValueError(f"{what} names `{axis}`, which is no axis of the manual region ({', '.join(names)})")
    if len(set(flat)) != len(flat):
        raise ValueError(f"{what} names an axis twice: {sharding!r}")
    return entry


def _axes(entry: Entry, region: _Region) -> list[str]:
    """The axes along which a tensor differs, in the region's order."""
    return [axis for axis in region.axes if any(axis in dim for dim in entry)]


def _for_rank(entry: Entry, rank: int) -> Entry:
    """An entry with the dims that it omits."""
    return (*entry, *[()] * (rank - len(entry)))


def _check_count(count: int, entries: Sequence[Entry], side: str, what: str, fn: Callable[..., Any]) -> None:
    if count != len(entries):
        raise ValueError(f"{side}_shardings of `{fn.__name__}` has {len(entries)} entries for {count} {what}")


def _cut(x: Tensor, entry: Entry, region: _Region, number: int) -> Tensor:
    """Divides a whole tensor into the devices' parts: [devices along each of its axes..., *one device's part]."""
    if len(entry) > x.dim():
        raise ValueError(f"in_shardings[{number}] has {len(entry)} entries for a tensor of {x.dim()} dims")
    names = _axes(entry, region)
    shape: list[int] = []
    front: dict[str, int] = {}
    part: list[int] = []
    for d, (size, axes) in enumerate(zip(x.shape, _for_rank(entry, x.dim()))):
        sizes = [region.mesh.axes[axis] for axis in axes]
        if size % (count := math.prod(sizes)):
            raise ValueError(
                f"in_shardings[{number}]: dim {d} of {list(x.shape)} does not divide over {', '.join(axes)} ({count})"
            )
        front |= {axis: len(shape) + i for i, axis in enumerate(axes)}
        part.append(len(shape) + len(axes))
        shape += [*sizes, size // count]
    if names:
        x = x.reshape(shape).permute([*(front[axis] for axis in names), *part])
    return _anchor(x, names, region=region)


def _join(x: Tensor, entry: Entry, region: _Region) -> Tensor:
    """Joins the devices' parts, [devices along each axis..., *part], to the whole tensor; the inverse of `_cut`."""
    names = _axes(entry, region)
    if not names:
        return x
    x = _anchor(x, names, region=region)
    order: list[int] = []
    shape: list[int] = []
    rank = x.dim() - len(names)
    for d, (size, axes) in enumerate(zip(x.shape[len(names) :], _for_rank(entry, rank))):
        order += [*map(names.index, axes), len(names) + d]
        shape.append(size * math.prod(region.mesh.axes[axis] for axis in axes))
    return x.permute(order).reshape(shape)


def _anchor(x: Tensor, leading: Sequence[str], whole: int | None = None, region: _Region | None = None) -> Tensor:
    """Annotates each leading dim as sharded over its axis of `leading`, and dim `whole` of the part as not sharded."""
    mesh = (region or _region()).mesh
    dims: list[str | None] = [*leading, *["?"] * (x.dim() - len(leading))]
    if whole is not None:
        dims[len(leading) + whole] = None
    return split_as(x, mesh, Sharding.of(mesh, dims, x.dim()))


def _map_over_axes(
    fn: Callable[..., tuple[Tensor, ...]], region: _Region, ins: Sequence[Entry], outs: Sequence[Entry],
    parts: Sequence[Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Runs `fn` mapped over the region's axes, the outermost first."""

    def level(number: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if number == len(region.axes):
            return fn(*tensors)
        axis = region.axes[number]

        def inner(place: Tensor, *mine: Tensor) -> tuple[Tensor, ...]:
            region.levels[axis], region.places[axis] = layers.maybe_get_level(place), place
            return level(number + 1, mine)

        along = [0 if any(axis in dim for dim in entry) else None for entry in ins]
        back = tuple(0 if any(axis in dim for dim in entry) else None for entry in outs)
        places = _anchor(torch.arange(region.mesh.axes[axis]), [axis], region=region)
        mapped = torch.vmap(inner, in_dims=(0, *along), out_dims=back, randomness="different")  # type: ignore[arg-type]
        return mapped(places, *tensors)  # type: ignore[no-any-return]

    return level(0, parts)


def _check_results(results: Sequence[Any], outs: Sequence[Entry], fn: Callable[..., Any]) -> None:
    """Raises ValueError for a result that is no tensor, or differs along an axis that its entry lacks."""
    for i, (result, entry) in enumerate(zip(results, outs)):
        if not isinstance(result, Tensor):
            raise ValueError(f"result {i} of the manual region `{fn.__name__}` is no tensor")
        if len(entry) > result.dim():
            raise ValueError(f"out_shardings[{i}] has {len(entry)} entries for a result of {result.dim()} dims")
        _, held = _unwrap(result)
        for axis in held:
            if not any(axis in dim for dim in entry):
                raise ValueError(
                    f"result {i} of the manual region `{fn.__name__}` differs along `{axis}`, which out_shardings[{i}] "
                    f"does not name: name it, or make the result the same everywhere (`psum`, `all_gather`)"
                )


@contextmanager
def _entering(region: _Region) -> Iterator[None]:
    token = _current.set(region)
    try:
        yield
    finally:
        _current.reset(token)


def _region(axis: str = "") -> _Region:
    """The region that is being traced. Raises ValueError if there is none, or it is not mapped over `axis`."""
    region = _current.get()
    if region is None or (axis and axis not in region.axes):
        where = "there is none" if region is None else f"it is one over {', '.join(region.axes)}"
        raise ValueError(f"a collective over `{axis}` is called outside of a manual region over it: {where}")
    return region


def _unwrap(x: Tensor) -> tuple[Tensor, list[str]]:
    """Returns the parts of all devices that a mapped tensor stands for, and the axes along which they differ.

    The parts are one tensor: [devices along each of these axes..., *part].
    """
    by_level = {level: axis for axis, level in _region().levels.items()}
    held: list[str] = []
    while layers.is_batchedtensor(x) and layers.maybe_get_level(x) in by_level:
        axis, dim = by_level[layers.maybe_get_level(x)], layers.maybe_get_bdim(x)
        x = layers.get_unwrapped(x).movedim(dim, 0)
        held.insert(0, axis)
    return x, held


def _wrap(x: Tensor, axes: Sequence[str]) -> Tensor:
    """Wraps a tensor whose first dims are the axes `axes` as one mapped over them; the inverse of `_unwrap`."""
    for axis in axes:
        x = layers._add_batch_dim(x, 0, _region().levels[axis])
    return x


def _vary_along(x: Tensor, axis: str) -> Tensor:
    """Expands a tensor along an axis, if it is the same on all devices of it."""
    region = _region(axis)
    whole, held = _unwrap(x)
    if axis in held:
        return x
    held = [name for name in region.axes if name in (*held, axis)]
    at = held.index(axis)
    return _wrap(whole.unsqueeze(at).expand(*whole.shape[:at], axis_size(axis), *whole.shape[at:]), held)


def _reduce_along(
    x: Tensor, axis: str, reduce: Callable[[Tensor, int], Tensor], same: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Reduces a tensor over the devices along an axis.

    same: `same(x, n)` is the result where all n devices have equal parts.
    """
    _region(axis)
    whole, held = _unwrap(x)
    if axis not in held:
        return same(x, axis_size(axis))
    at = held.index(axis)
    held.remove(axis)
    return _wrap(_anchor(reduce(whole, at), held), held)


def _dim(dim: int, x: Tensor) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"a tensor of {x.dim()} dims has no dim {dim}")
    return dim % x.dim()


def _check_divides(x: Tensor, dim: int, n: int, what: str, axis: str) -> None:
    if x.shape[dim] % n:
        raise ValueError(f"`{what}`: dim {dim} of {list(x.shape)} does not divide over `{axis}` ({n})")
