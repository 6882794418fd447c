"""Rules of x[i, j, ...] and x[i, j, ...] = v, with index tensors.

A device of a sharded dim reads or writes its own elements. Indices that count along one of their own dims (`arange`)
pair that dim with the one they index: both are sharded alike, without communication.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from tpshard.parallelism.graph import Op, Ref, Value
from tpshard.parallelism.rules.decompositions import put
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.indexing import own_indices, without_foreign, write_own
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule, broadcast

aten = torch.ops.aten


def counts_along(value: Value) -> int | None:
    """The dim along which a value counts 0, 1, 2, ..., being constant along all others; None if that is not certain."""
    op = value.producer
    if op is None:
        return None
    name = str(op.target)
    if name.startswith("aten.arange"):
        start, step = (op.args[0] if len(op.args) > 1 else 0), (op.args[2] if len(op.args) > 2 else 1)
        return 0 if start == 0 and step == 1 else None
    if name == "aten.select.int":
        return _of_piece(op.operands[0], op.args[1] % op.operands[0].rank, op.args[2])
    source = op.operands[0] if len(op.operands) == 1 else None
    dim = counts_along(source) if source is not None else None
    if source is None or dim is None:
        return None
    if name in ("aten.clone.default", "aten._to_copy.default"):
        return dim
    if name == "aten.expand.default":
        moved = dim + value.rank - source.rank
        return moved if value.shape[moved] == source.shape[dim] else None
    if name == "aten.permute.default":
        return [d % source.rank for d in op.args[1]].index(dim)
    if name in ("aten.view.default", "aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.dims"):
        before, size = math.prod(source.shape[:dim]), source.shape[dim]
        same = (d for d, n in enumerate(value.shape) if n == size and math.prod(value.shape[:d]) == before)
        return next(same, None)
    return None


def _of_piece(source: Value, dim: int, index: int) -> int | None:
    """The dim along which `source[..., index, ...]` counts (see `counts_along`), also for a concatenated source."""
    joined = source.producer
    if joined is not None and str(joined.target) == "aten.cat.default":
        along = (joined.args[1] if len(joined.args) > 1 else 0) % source.rank
        if along != dim:
            return None
        for part in joined.operands:
            if index < part.shape[dim]:
                source = part
                break
            index -= part.shape[dim]
    counted_dim = counts_along(source)
    return None if counted_dim is None or counted_dim == dim else counted_dim - (counted_dim > dim)


@dataclass
class Lookup:
    """The factors of the tensors in one indexing call, x[indices]."""

    at: list[int]
    """The dims of x that are indexed, in the order of the index tensors."""
    dims: tuple[Dim, ...]
    """The factors of x."""
    picked: tuple[Dim, ...]
    """The factors of the broadcast indices."""
    of: list[tuple[Dim, ...]]
    """The factors of each index tensor."""
    out: tuple[Dim, ...]
    """The factors of x[indices]."""
    counted: list[bool]
    """For each index tensor, whether it counts along a dim."""

    @property
    def owner(self) -> list[int | None]:
        """The factor of the dim that each index tensor indexes; None for a dim of size 1."""
        return [self.dims[d][0] if self.dims[d] else None for d in self.at]

    def without_foreign(self, at: LocalOp, node: Any, foreign: Any) -> Any:
        """Values in the order of x[indices] with 0 where the mask of other devices' indices is true."""
        before = self.at[0] if self.out[: self.at[0]] == self.dims[: self.at[0]] else 0
        behind = len(self.dims) - len(self.at) - before
        return without_foreign(at, node, foreign, (*at.shape_of(foreign), *[1] * behind))


def lookup(op: Op, factors: Factors, kind: Kind) -> Lookup:
    """Builds the factors of an indexing call. Indexed dims are of `kind`, except those that indices count along."""
    x, slots = op.operands[0], op.args[1]
    at = [d for d, s in enumerate(slots) if isinstance(s, Ref)]
    indices = [op.operands[s.index] for s in slots if isinstance(s, Ref)]
    if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
        raise ValueError("indexing by a boolean mask gives a result of unknown size: use torch.where")
    shape = tuple(torch.broadcast_shapes(*(i.shape for i in indices)))
    picked = factors.dims(shape)
    index_dims = []
    paired: dict[int, Dim] = {}
    for d, index in zip(at, indices):
        index_dims.append(broadcast(index.shape, shape, picked))
        dim = counts_along(index)
        if dim is not None and index.shape[dim] == x.shape[d] != 1 and picked[dim - index.rank] not in paired.values():
            paired[d] = picked[dim - index.rank]
    dims = tuple(
        paired[d] if d in paired else (factors.new(n, kind if d in at else Kind.PASS),) if n != 1 else ()
        for d, n in enumerate(x.shape)
    )
    start = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    rest = [dims[d] for d in range(x.rank) if d not in at]
    return Lookup(at, dims, picked, index_dims, (*rest[:start], *picked, *rest[start:]), [d in paired for d in at])


def _own_slots(at: LocalOp, call: Lookup) -> tuple[list[Any], Any]:
    """The indices relative to a device's shard, and a mask of those in other shards, or None."""
    slots: list[Any] = [None] * at.op.operands[0].rank
    foreign = None
    for i, (d, f, counted) in enumerate(zip(call.at, call.owner, call.counted)):
        slots[d] = at.inputs[1 + i]
        if f is None or not at.axes(f):
            continue
        if counted:  # element by element, padding included, so that nothing is written into another element's place
            slots[d] = _counting(at, call.of[i].index((f,)), at.size(f), at.operand_shape(1 + i))
            continue
        positive = at.emit(aten.remainder.Scalar, slots[d], at.op.operands[0].shape[d])
        slots[d], far = own_indices(at, positive, f)
        foreign = far if foreign is None else at.emit(aten.logical_or.default, foreign, far)
    return slots, foreign


def _counting(at: LocalOp, dim: int, count: int, shape: tuple[int, ...]) -> Any:
    """Indices that count along a dim of `shape` on every device alike."""
    counted = at.emit(aten.arange.default, count, dtype=torch.int64)
    viewed = at.emit(aten.reshape.default, counted, [n if d == dim else 1 for d, n in enumerate(shape)])
    return at.emit(aten.expand.default, viewed, list(shape))


def index(op: Op) -> Rule:
    """The rule of x[i, j, ...]: over sharded indexed dims the result is a sum, to which a device adds its elements."""
    factors = Factors()
    x = op.operands[0]
    call = lookup(op, factors, Kind.WHOLE if x.dtype == torch.bool else Kind.REDUCE)

    def local(at: LocalOp) -> Any:
        slots, foreign = _own_slots(at, call)
        node = at.emit(op.target, at.inputs[0], slots)
        return node if foreign is None else call.without_foreign(at, node, foreign)

    assert len(call.out) == op.results[0].rank
    return factors.rule(
        [call.dims, *call.of], [call.out], additive=(0,), local=local,
        fills=tuple((1 + i, 0.0) for i in range(len(call.of))),
        guarded=tuple(f for f, counted in zip(call.owner, call.counted) if f is not None and not counted),
    )  # fmt: skip


def index_put(op: Op) -> Rule:
    """The rule of x.index_put(indices, values, accumulate).

    With `accumulate` the values may be sharded instead of x: the results of all devices are then summed.
    """
    if len(op.args) > 3 and op.args[3]:
        return replace(index_put_as(op, Kind.WHOLE), others=(index_put_as(op, Kind.REDUCE),))
    return index_put_as(op, Kind.WHOLE)


def index_put_as(op: Op, kind: Kind) -> Rule:
    """The rule of x.index_put(indices, values): a device of a sharded dim writes only its own elements. The dims of the
    indices are of `kind`: whole, or summed."""
    factors = Factors()
    values = op.operands[op.args[2].index]
    call = lookup(op, factors, Kind.PASS)
    counted = {f for f, counts in zip(call.owner, call.counted) if counts}
    sizes = [factors.sizes[d[0]] if d else 1 for d in call.out]
    of_values = broadcast(values.shape, sizes, call.out)
    picked = [f for dim in call.picked for f in dim if f not in counted]
    for f in picked:  # values that broadcast along it would be added at the indices of its padding too
        factors.kinds[f] = kind if any(f in dim for dim in of_values) else Kind.WHOLE
    adds = len(op.args) > 3 and op.args[3]

    def local(at: LocalOp) -> Any:
        slots, foreign = _own_slots(at, call)
        target, value, rest = at.inputs[0], at.inputs[1 + len(call.of)], op.args[3:]
        for f in picked:  # x itself is added once
            if at.axes(f):
                target = at.emit(aten.mul.Tensor, target, at.first(f))
        if foreign is None:
            return at.emit(op.target, target, slots, value, *rest)
        if adds:
            return at.emit(op.target, target, slots, call.without_foreign(at, value, foreign), *rest)
        d, f = next(
            (d, f) for d, f, c in zip(call.at, call.owner, call.counted) if f is not None and at.axes(f) and not c
        )
        shape = torch.broadcast_shapes(at.shape_of(slots[d]), at.shape_of(foreign))
        wide = at.emit(aten.expand.default, slots[d], list(shape))
        slots[d] = at.emit(aten.masked_fill.Scalar, wide, foreign, at.size(f))
        return write_own(at, target, d, at.size(f), lambda grown: at.emit(op.target, grown, slots, value, *rest))

    return factors.rule(
        [call.dims, *call.of, of_values], [call.dims], local=local, additive=(0, 1 + len(call.of)) if adds else (),
        fills=tuple((1 + i, 0.0) for i in range(len(call.of))),
    )  # fmt: skip


OPS: Table = {
    aten.index: Entry(index, lookup=True),
    aten._unsafe_index: Entry(index, lookup=True),
    aten.index_put: Entry(index_put, recorded=put),
    aten._unsafe_index_put: Entry(index_put, recorded=put),
}
