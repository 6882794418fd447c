"""Rules of lookups and updates by index: each device masks the indices that it does not own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tpshard.parallelism.graph import Op, Ref
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule
from tpshard.parallelism.rules.shape import whole

aten = torch.ops.aten


def own_indices(at: LocalOp, index: Any, factor: int, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """The indices relative to this device's shard, with those of other devices set to 0, and the mask of the latter."""
    shifted = at.emit(aten.sub.Tensor, index, at.offset(factor), shape=shape, dtype=torch.int64)
    below = at.emit(aten.lt.Scalar, shifted, 0, shape=shape, dtype=torch.bool)
    above = at.emit(aten.ge.Scalar, shifted, at.valid(factor), shape=shape, dtype=torch.bool)
    foreign = at.emit(aten.logical_or.default, below, above, shape=shape, dtype=torch.bool)
    return at.emit(aten.masked_fill.Scalar, shifted, foreign, 0, shape=shape, dtype=torch.int64), foreign


def _unsqueeze(at: LocalOp, mask: Any, shape: tuple[int, ...], dim: int) -> tuple[Any, tuple[int, ...]]:
    grown = (*shape[:dim], 1, *shape[dim:])
    return at.emit(aten.unsqueeze.default, mask, dim, shape=grown, dtype=torch.bool), grown


def embedding(op: Op) -> Rule:
    """The rule of embedding, `vd,...->...d`: a device of a sharded vocabulary looks up its own rows; others are 0."""
    table, index = op.operands
    factors = Factors()
    v = factors.new(table.shape[0], Kind.REDUCE)
    d = factors.dims(table.shape[1:])
    rows = factors.dims(index.shape)

    def local(at: LocalOp) -> Any:
        if not at.axes(v):
            return at.with_args(Ref(0), Ref(1))
        shape = at.operand_shape(1)
        local_rows, foreign = own_indices(at, at.inputs[1], v, shape)
        looked_up = at.emit(aten.embedding.default, at.inputs[0], local_rows, shape=at.shape())
        mask, _ = _unsqueeze(at, foreign, shape, len(shape))
        return at.emit(aten.masked_fill.Scalar, looked_up, mask, 0, shape=at.shape())

    return factors.rule([((v,), *d), rows], [(*rows, *d)], local=local, work=(), flops=0, fills=((1, 0),), guarded=(v,))


def embedding_backward(op: Op) -> Rule:
    """The rule of embedding_dense_backward: a device of a sharded vocabulary adds only its own rows to the gradient.

    With `scale_grad_by_freq`, which divides a row's sum by its number of lookups, all lookups are counted.
    """
    grad, index = op.operands
    out = op.results[0]
    counted = bool(op.args[4])
    factors = Factors()
    rows = factors.dims(index.shape, Kind.WHOLE if counted else Kind.REDUCE)
    v = factors.new(out.shape[0], Kind.WHOLE if counted else Kind.PASS)
    d = factors.dims(out.shape[1:])

    def local(at: LocalOp) -> Any:
        padding, scale = op.args[3], op.args[4]
        if not at.axes(v):
            return at.with_args(Ref(0), Ref(1), at.size(v), padding, scale)
        shape = at.operand_shape(1)
        local_rows, foreign = own_indices(at, at.inputs[1], v, shape)
        if padding >= 0:  # an index into the whole table, whose row gets no gradient
            unlearned = at.emit(aten.eq.Scalar, at.inputs[1], padding, shape=shape, dtype=torch.bool)
            foreign = at.emit(aten.logical_or.default, foreign, unlearned, shape=shape, dtype=torch.bool)
        mask, _ = _unsqueeze(at, foreign, shape, len(shape))
        own_grad = at.emit(aten.masked_fill.Scalar, at.inputs[0], mask, 0, shape=at.operand_shape(0))
        return at.emit(op.target, own_grad, local_rows, at.size(v), -1, scale, shape=at.shape())

    return factors.rule(
        [(*rows, *d), rows], [((v,), *d)], local=local, additive=(0,), flops=grad.numel, fills=((1, 0),)
    )


def index_select(op: Op) -> Rule:
    """The rule of x.index_select(dim, index), an embedding lookup along any dim."""
    x, index = op.operands
    dim = op.args[1] % max(x.rank, 1)
    factors = Factors()
    v = factors.new(x.shape[dim], Kind.REDUCE)
    picked = factors.dims(index.shape)[0] if index.rank else ()
    rest = {d: ((factors.new(n),) if n != 1 else ()) for d, n in enumerate(x.shape) if d != dim}

    def local(at: LocalOp) -> Any:
        if not at.axes(v):
            return at.same()
        shape = at.operand_shape(1)
        local_rows, foreign = own_indices(at, at.inputs[1], v, shape)
        looked_up = at.emit(op.target, at.inputs[0], dim, local_rows, shape=at.shape())
        view = tuple(shape[0] if d == dim else 1 for d in range(x.rank))
        mask = at.emit(aten.reshape.default, foreign, list(view), shape=view, dtype=torch.bool)
        return at.emit(aten.masked_fill.Scalar, looked_up, mask, 0, shape=at.shape())

    source = tuple((v,) if d == dim else rest[d] for d in range(x.rank))
    out = tuple(picked if d == dim else rest[d] for d in range(x.rank))
    return factors.rule([source, (picked,) if index.rank else ()], [out], local=local, fills=((1, 0),), guarded=(v,))


def gather(op: Op) -> Rule:
    """The rule of x.gather(dim, index): over a sharded dim the result is a sum of what each device owns.

    An example is the logit of the target in a sharded vocabulary.
    """
    x, index = op.operands
    if x.rank == 0 or index.rank == 0:
        return whole(op, [], additive=())
    dim = op.args[1] % x.rank
    factors = Factors()
    v = factors.new(x.shape[dim], Kind.REDUCE)
    source, picked = _dims_along(factors, op, dim, v, Kind.PASS)

    def local(at: LocalOp) -> Any:
        if not at.axes(v):
            return at.same()
        local_rows, foreign = own_indices(at, at.inputs[1], v, at.operand_shape(1))
        looked_up = at.emit(op.target, at.inputs[0], dim, local_rows, shape=at.shape())
        return at.emit(aten.masked_fill.Scalar, looked_up, foreign, 0, shape=at.shape())

    return factors.rule([source, picked], [picked], local=local, fills=((1, 0),), guarded=(v,))


def _dims_along(factors: Factors, op: Op, dim: int, v: int, kind: Kind) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """The dims of x, whose `dim` is the factor `v`, and of the index, whose factor there is new and of `kind`.

    The other dims are shared where both have the same size, and whole where the index has a part of them.
    """
    x, index = op.operands[:2]
    source: list[Dim] = []
    picked: list[Dim] = []
    for d, (n, m) in enumerate(zip(x.shape, index.shape)):
        if d == dim:
            source.append((v,))
            picked.append((factors.new(m, kind),) if m != 1 else ())
        elif n == m:
            shared = (factors.new(n),) if n != 1 else ()
            source.append(shared)
            picked.append(shared)
        else:
            source.append((factors.new(n, Kind.WHOLE),))
            picked.append((factors.new(m, Kind.WHOLE),) if m != 1 else ())
    return tuple(source), tuple(picked)


def scatter(op: Op) -> Rule:
    """The rule of scatter and scatter_add; what is added may be sharded instead of x, and the results summed."""
    if "scatter_add" in op.target.overloadpacket.__name__ and op.operands[0].rank:
        return replace(indexed_write(op, Kind.WHOLE), others=(indexed_write(op, Kind.REDUCE),))
    return indexed_write(op, Kind.WHOLE)


def indexed_write(op: Op, kind: Kind) -> Rule:
    """The rule of one scatter: a device of a sharded dim writes only its own elements. Along that dim, the index is of
    `kind`: whole, or summed."""
    x, index = op.operands[:2]
    src = op.operands[2] if len(op.operands) > 2 else None
    if x.rank == 0 or (src is not None and src.shape != index.shape):
        return whole(op, range(x.rank), additive=())
    dim = op.args[1] % x.rank
    adds = "scatter_add" in op.target.overloadpacket.__name__
    factors = Factors()
    v = factors.new(x.shape[dim])
    target, of_source = _dims_along(factors, op, dim, v, kind)

    def local(at: LocalOp) -> Any:
        for f in of_source[dim]:  # x itself is added once
            if at.axes(f):
                at.inputs[0] = at.emit(aten.mul.Tensor, at.inputs[0], at.first(f), shape=at.shape())
        if not at.axes(v):
            return at.same()
        shape = at.operand_shape(1)
        local_rows, foreign = own_indices(at, at.inputs[1], v, shape)
        if adds:
            own_source = at.emit(aten.masked_fill.Scalar, at.inputs[2], foreign, 0, shape=at.operand_shape(2))
            return at.emit(op.target, at.inputs[0], dim, local_rows, own_source, shape=at.shape())
        # one more row than owned: foreign values are written there and cut off
        edge = at.emit(aten.masked_fill.Scalar, local_rows, foreign, at.size(v), shape=shape, dtype=torch.int64)
        grown = tuple(n + 1 if d == dim else n for d, n in enumerate(at.shape()))
        widths = [0, 0] * (x.rank - 1 - dim) + [0, 1]
        padded = at.emit(aten.constant_pad_nd.default, at.inputs[0], widths, 0, shape=grown)
        value = at.inputs[2] if src is not None else op.args[3]
        result = at.emit(op.target, padded, dim, edge, value, shape=grown)
        return at.emit(aten.slice.Tensor, result, dim, 0, at.size(v), shape=at.shape())

    operands = [target, of_source] + ([of_source] if src is not None else [])
    return factors.rule(operands, [target], local=local, additive=(0, 2) if adds else (), fills=((1, 0),))


OPS: Table = {
    aten.embedding: Entry(embedding, lookup=True),
    aten.embedding_dense_backward: Entry(embedding_backward),
    aten.index_select: Entry(index_select, lookup=True, commutes=True),
    aten.gather: Entry(gather, lookup=True),
    aten.scatter.value: Entry(scatter),
    aten.scatter.src: Entry(scatter),
    aten.scatter_add: Entry(scatter),
}
