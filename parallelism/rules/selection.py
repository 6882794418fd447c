"""Rules of argmax, top-k and cumulative sums over a sharded dim: devices exchange only small local results.

The maximum of all elements is the maximum of the shards' maxima; likewise for top-k. Each of these rules is an
alternative to the one that needs the whole dim, which is cheaper if another dim can take the axes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.decompositions import flatten_first
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.reduction import along, whole_reduction
from tpshard.parallelism.rules.rule import Exchange, Factors, LocalOp, Rule
from tpshard.parallelism.rules.shape import unlike

aten = torch.ops.aten
INDEX = torch.int32
"""The dtype in which devices exchange indices: half the size of torch's, and large enough for any dim."""


def _argument(op: Op, position: int, name: str, default: Any) -> Any:
    return op.args[position] if len(op.args) > position else op.kwargs.get(name, default)


def _by_local_results(op: Op, dim: int, remaining: int, collectives: int, **rest: Any) -> Rule:
    """A rule by which every device reduces its shard of a dim to `remaining` elements, and sends them to the others."""
    x = op.operands[0]
    factors = Factors()
    dims = factors.dims(x.shape)
    remaining_dim = () if op.results[0].rank < x.rank else (dims[dim],) if op.results[0].shape == x.shape else ((),)
    out = (*dims[:dim], *remaining_dim, *dims[dim + 1 :])
    others = math.prod(n for d, n in enumerate(x.shape) if d != dim)
    exchanged_bytes = remaining * others * (x.dtype.itemsize + (INDEX.itemsize if collectives > 1 else 0))
    exchanged = tuple(Exchange(f, exchanged_bytes, collectives) for f in dims[dim])
    return factors.rule(
        [dims], [out] * len(op.results), exchanged=exchanged, flops=x.numel, work=tuple(range(x.rank)), **rest
    )


def extreme(op: Op) -> Rule:
    """The rule of argmax and argmin, and of max and min along a dim; of equal elements the first one counts."""
    x = op.operands[0]
    dim = _argument(op, 1, "dim", None)
    main = whole_reduction(op)
    if dim is None or x.rank == 0 or x.shape[dim] == 1 or x.dtype == torch.bool:
        return main
    dim %= x.rank
    largest = "max" in op.target.overloadpacket.__name__
    best = aten.max.dim if largest else aten.min.dim

    def local(at: LocalOp) -> Any:
        (f,) = way.operands[0][dim]
        if not at.axes(f):
            return at.same()
        value, index = at.several(best, at.inputs[0], dim, True)
        values, indices = at.gather(value, f), at.gather(_global_indices(at, index, f), f)
        value, winner = at.several(best, values, 0, True)
        index = at.emit(aten._to_copy.default, at.emit(aten.gather.default, indices, 0, winner), dtype=torch.int64)
        results = [at.emit(aten.reshape.default, node, list(at.shape())) for node in (value, index)]
        return results if len(op.results) > 1 else results[1]

    way = _by_local_results(op, dim, 1, 2, local=local, fills=((0, float("-inf") if largest else float("inf")),))
    return replace(main, others=(way,))


def topk(op: Op) -> Rule:
    """The rule of topk(x, k, dim, largest, sorted); of equal elements any may be returned, as in torch."""
    x = op.operands[0]
    main = along(op, 2)
    if x.rank == 0:
        return main
    main = replace(main, blocked=unlike(main, op))
    k, dim = op.args[1], _argument(op, 2, "dim", -1) % x.rank
    largest, ordered = _argument(op, 3, "largest", True), _argument(op, 4, "sorted", True)

    def local(at: LocalOp) -> Any:
        (f,) = way.operands[0][dim]
        if not at.axes(f):
            return at.same()
        value, index = at.several(aten.topk.default, at.inputs[0], min(k, at.size(f)), dim, largest, ordered)
        values, indices = (_in_a_row(at, at.gather(node, f), dim) for node in (value, _global_indices(at, index, f)))
        value, place = at.several(aten.topk.default, values, k, dim, largest, ordered)
        index = at.emit(aten.gather.default, indices, dim, place)
        return [value, at.emit(aten._to_copy.default, index, dtype=torch.int64)]

    if x.shape[dim] == 1:
        return main
    way = _by_local_results(op, dim, k, 2, local=local, even=True)
    return replace(main, others=(way,))


def _global_indices(at: LocalOp, index: Any, factor: int) -> Any:
    """Converts indices into a shard to indices into the whole dim."""
    return at.emit(aten._to_copy.default, at.emit(aten.add.Tensor, index, at.offset(factor)), dtype=INDEX)


def _in_a_row(at: LocalOp, node: Any, dim: int) -> Any:
    """Joins gathered shards along their dim: [members, ..., n, ...] -> [..., members * n, ...]."""
    node = at.emit(aten.permute.default, node, [*range(1, dim + 1), 0, *range(dim + 1, len(at.shape_of(node)))])
    shape = at.shape_of(node)
    return at.emit(aten.reshape.default, node, [*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]])


def sum_to_end(x: Any, dim: int, **kwargs: Any) -> Any:
    """The sums of each element and all behind it, an op of the global graph alone: a flipped cumsum of a flipped x.

    That is the gradient of cumsum, and neither flip of a sharded dim need move anything.
    """
    return x.flip(dim).cumsum(dim, **kwargs).flip(dim)


def running_sum(op: Op) -> Rule:
    """The rule of cumsum and `sum_to_end`: the sums within a shard, plus the total of all shards on the other side."""
    x, out, backward = op.operands[0], op.results[0], op.target is sum_to_end
    dim = op.args[1] % max(x.rank, 1)

    def sums_of_shard(at: LocalOp) -> Any:
        if not backward:
            return at.same()
        flipped = at.emit(aten.flip.default, at.inputs[0], [dim])
        return at.emit(aten.flip.default, at.emit(aten.cumsum.default, flipped, dim, **op.kwargs), [dim])

    main = replace(along(op), additive=(0,) if x.rank else (), local=sums_of_shard)
    if x.rank == 0 or x.shape[dim] == 1:
        return main

    def local(at: LocalOp) -> Any:
        (f,), sums = way.operands[0][dim], sums_of_shard(at)
        if not at.axes(f):
            return sums
        totals = at.gather(at.emit(aten.narrow.default, sums, dim, 0 if backward else at.size(f) - 1, 1), f)
        places = at.emit(aten.arange.default, at.members(f), dtype=torch.int64)
        apart = at.emit(aten.le.Scalar if backward else aten.ge.Scalar, places, at.position(f))
        apart = at.emit(aten.reshape.default, apart, [at.members(f)] + [1] * x.rank)
        others = at.emit(aten.masked_fill.Scalar, totals, apart, 0)
        others = at.emit(aten.sum.dim_IntList, others, [0], dtype=out.dtype)
        return at.emit(aten.add.Tensor, sums, others)

    way = _by_local_results(op, dim, 1, 1, local=local, fills=((0, 0.0),))
    return replace(main, others=(way,))


OPS: Table = {
    aten.argmax: Entry(extreme, recorded=flatten_first(aten.argmax)),
    aten.argmin: Entry(extreme, recorded=flatten_first(aten.argmin)),
    aten.max.dim: Entry(extreme),
    aten.min.dim: Entry(extreme),
    aten.topk: Entry(topk),
    aten.cumsum: Entry(running_sum),
    sum_to_end: Entry(running_sum),
}
