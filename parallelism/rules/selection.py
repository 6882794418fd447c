"""Rules of argmax, top-k and cumulative sums over a sharded dim: devices exchange only small local results.

The maximum of all elements is the maximum of the shards' maxima; likewise for top-k. Each of these rules is an
alternative to the one that needs the whole dim, which is cheaper if another dim can take the axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.decompositions import flatten_first
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.reduction import along, whole_reduction
from tpshard.parallelism.rules.rule import Dim, Exchange, Factors, LocalOp, Rule, product
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
    dims: list[Dim] = [(factors.new(n),) if n != 1 else () for n in x.shape]
    out = tuple(
        () if d == dim and op.results[0].shape[d : d + 1] != x.shape[d : d + 1] else members
        for d, members in enumerate(dims)
    )
    if op.results[0].rank < x.rank:
        out = (*out[:dim], *out[dim + 1 :])
    others = product([n for d, n in enumerate(x.shape) if d != dim])
    exchanged_bytes = remaining * others * (x.dtype.itemsize + (INDEX.itemsize if collectives > 1 else 0))
    exchanged = tuple(Exchange(f, exchanged_bytes, collectives) for f in dims[dim])
    return factors.rule(
        [tuple(dims)], [out] * len(op.results), exchanged=exchanged, flops=x.numel, work=tuple(range(x.rank)), **rest
    )


def extreme(op: Op) -> Rule:
    """The rule of argmax and argmin, and of max and min along a dim; of equal elements the first one counts."""
    x = op.operands[0]
    dim = _argument(op, 1, "dim", None)
    main = whole_reduction(op)
    if dim is None or x.rank == 0 or x.shape[dim] == 1 or x.dtype == torch.bool:
        return main
    dim %= x.rank
    keep = op.results[0].rank == x.rank
    largest = "max" in op.target.overloadpacket.__name__
    best = aten.max.dim if largest else aten.min.dim

    def local(at: LocalOp) -> Any:
        (f,) = way.operands[0][dim]
        if not at.axes(f):
            return at.same()
        one = tuple(1 if d == dim else n for d, n in enumerate(at.operand_shape(0)))
        value, index = at.several(best, at.inputs[0], dim, True, like=[(one, x.dtype), (one, torch.int64)])
        values, indices = at.gather(value, f), at.gather(_global_indices(at, index, f), f)
        value, winner = at.several(best, values, 0, True, like=[((1, *one), x.dtype), ((1, *one), torch.int64)])
        index = at.emit(aten.gather.default, indices, 0, winner, shape=(1, *one), dtype=INDEX)
        index = at.emit(aten._to_copy.default, index, shape=(1, *one), dtype=torch.int64)
        results = [value, index] if len(op.results) > 1 else [index]
        shape = one if keep else (*one[:dim], *one[dim + 1 :])
        results = [
            at.emit(aten.reshape.default, node, list(shape), shape=shape, dtype=result.dtype)
            for node, result in zip(results, op.results)
        ]
        return results if len(results) > 1 else results[0]

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

    def best(at: LocalOp, node: Any, k: int, shape: Sequence[int]) -> list[Any]:
        like = [(tuple(shape), x.dtype), (tuple(shape), torch.int64)]
        return at.several(aten.topk.default, node, k, dim, largest, ordered, like=like)

    def local(at: LocalOp) -> Any:
        (f,) = way.operands[0][dim]
        if not at.axes(f):
            return at.same()
        shape = at.operand_shape(0)
        count = min(k, shape[dim])
        few = tuple(count if d == dim else n for d, n in enumerate(shape))
        value, index = best(at, at.inputs[0], count, few)
        values, indices = (_in_a_row(at, at.gather(node, f), dim) for node in (value, _global_indices(at, index, f)))
        value, place = best(at, values, k, at.shape())
        index = at.emit(aten.gather.default, indices, dim, place, shape=at.shape(), dtype=INDEX)
        return [value, at.emit(aten._to_copy.default, index, shape=at.shape(), dtype=torch.int64)]

    if x.shape[dim] == 1:
        return main
    way = _by_local_results(op, dim, k, 2, local=local, even=True)
    return replace(main, others=(way,))


def _global_indices(at: LocalOp, index: Any, factor: int) -> Any:
    """Converts indices into a shard to indices into the whole dim."""
    shape = at.shape_of(index)
    index = at.emit(aten.add.Tensor, index, at.offset(factor), shape=shape, dtype=torch.int64)
    return at.emit(aten._to_copy.default, index, shape=shape, dtype=INDEX)


def _in_a_row(at: LocalOp, node: Any, dim: int) -> Any:
    """Joins gathered shards along their dim: [members, ..., n, ...] -> [..., members * n, ...]."""
    shape = at.shape_of(node)
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]
    turned = [shape[d] for d in order]
    dtype = at.dtype_of(node)
    node = at.emit(aten.permute.default, node, order, shape=turned, dtype=dtype)
    joined = [*turned[:dim], turned[dim] * turned[dim + 1], *turned[dim + 2 :]]
    return at.emit(aten.reshape.default, node, joined, shape=joined, dtype=dtype)


def running_sum(op: Op) -> Rule:
    """The rule of cumsum: the cumulative sums of a shard, plus the total of all shards before it."""
    x, out = op.operands[0], op.results[0]
    main = along(op)
    if x.rank == 0 or x.shape[op.args[1]] == 1:
        return main
    dim = op.args[1] % x.rank

    def local(at: LocalOp) -> Any:
        (f,) = way.operands[0][dim]
        if not at.axes(f):
            return at.same()
        sums = at.same()
        one = tuple(1 if d == dim else n for d, n in enumerate(at.shape()))
        total = at.emit(aten.narrow.default, sums, dim, at.size(f) - 1, 1, shape=one)
        totals = at.gather(total, f)
        members = at.shape_of(totals)[0]
        places = at.emit(aten.arange.default, members, shape=(members,), dtype=torch.int64)
        behind = at.emit(aten.ge.Scalar, places, at.position(f), shape=(members,), dtype=torch.bool)
        view = [members] + [1] * x.rank
        behind = at.emit(aten.reshape.default, behind, view, shape=view, dtype=torch.bool)
        before = at.emit(aten.masked_fill.Scalar, totals, behind, 0, shape=(members, *one))
        before = at.emit(aten.sum.dim_IntList, before, [0], shape=one, dtype=out.dtype)
        return at.emit(aten.add.Tensor, sums, before, shape=at.shape())

    way = _by_local_results(op, dim, 1, 1, local=local, fills=((0, 0.0),))
    return replace(main, others=(way,))


OPS: Table = {
    aten.argmax: Entry(extreme, recorded=flatten_first(aten.argmax)),
    aten.argmin: Entry(extreme, recorded=flatten_first(aten.argmin)),
    aten.max.dim: Entry(extreme),
    aten.min.dim: Entry(extreme),
    aten.topk: Entry(topk),
    aten.cumsum: Entry(running_sum),
}
