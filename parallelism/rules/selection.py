"""Rules of argmax, top-k and scans of a sharded dim: devices exchange only small local results.

The maximum of all elements is the maximum of the shards' maxima; likewise for top-k, and for what a scan adds up. Each
of these rules is an alternative to the one that needs the whole dim, which is cheaper if another dim can take the axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.decompositions import flatten_first
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.indexing import finite
from tpshard.parallelism.rules.reduction import along, reduced_dims, whole_reduction
from tpshard.parallelism.rules.rule import Exchange, Factors, LocalOp, Rule
from tpshard.parallelism.rules.shape import unlike

aten = torch.ops.aten
INDEX = torch.int32
"""The dtype in which devices exchange indices: half the size of torch's, and large enough for any dim."""


def _argument(op: Op, position: int, name: str, default: Any) -> Any:
    return op.args[position] if len(op.args) > position else op.kwargs.get(name, default)


def _by_local_results(op: Op, chosen: Sequence[int], remaining: int, collectives: int, **rest: Any) -> Rule:
    """A rule by which every device reduces its shard of the `chosen` dims to `remaining` elements, and sends them to
    the others."""
    x, out = op.operands[0], op.results[0]
    factors = Factors()
    dims = factors.dims(x.shape)
    left = dims
    if out.shape != x.shape:
        left = tuple(() if d in chosen else n for d, n in enumerate(dims) if out.rank == x.rank or d not in chosen)
    others = math.prod(n for d, n in enumerate(x.shape) if d not in chosen)
    exchanged_bytes = remaining * others * (out.dtype.itemsize + (INDEX.itemsize if collectives > 1 else 0))
    exchanged = tuple(Exchange(f, exchanged_bytes, collectives) for d in chosen for f in dims[d])
    return factors.rule(
        [dims], [left] * len(op.results), exchanged=exchanged, flops=x.numel, work=tuple(range(x.rank)), **rest
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

    way = _by_local_results(op, [dim], 1, 2, local=local, fills=((0, float("-inf") if largest else float("inf")),))
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
    way = _by_local_results(op, [dim], k, 2, local=local, even=True)
    return replace(main, others=(way,))


def _global_indices(at: LocalOp, index: Any, factor: int) -> Any:
    """Converts indices into a shard to indices into the whole dim."""
    return at.emit(aten._to_copy.default, at.emit(aten.add.Tensor, index, at.offset(factor)), dtype=INDEX)


def _in_a_row(at: LocalOp, node: Any, dim: int) -> Any:
    """Joins gathered shards along their dim: [members, ..., n, ...] -> [..., members * n, ...]."""
    node = at.emit(aten.permute.default, node, [*range(1, dim + 1), 0, *range(dim + 1, len(at.shape_of(node)))])
    shape = at.shape_of(node)
    return at.emit(aten.reshape.default, node, [*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]])


@dataclass(frozen=True)
class Scan:
    """How an op accumulates along a dim.

    neutral: the value that changes no result. join: the op that adds the total of earlier shards to a shard's results;
    None where those are chosen instead, with the place of each.
    """

    neutral: float
    join: Any = None


SCANS = {
    aten.cumsum.default: Scan(0.0, aten.add.Tensor),
    aten.cumprod.default: Scan(1.0, aten.mul.Tensor),
    aten.logcumsumexp.default: Scan(-math.inf, aten.logaddexp.default),
    aten.cummax.default: Scan(-math.inf),
    aten.cummin.default: Scan(math.inf),
}


def scan_to_end(x: Any, dim: int, scan: Any, **kwargs: Any) -> Any:
    """The scan of each element and all behind it, an op of the global graph alone: a flipped scan of a flipped x.

    That is the gradient of cumsum, and neither flip of a sharded dim need move anything.
    """
    return scan(x.flip(dim), dim, **kwargs).flip(dim)


def accumulated(op: Op) -> Rule:
    """The rule of scans and `scan_to_end`: the scan of a shard, joined with the totals of those before (behind) it."""
    x, backward = op.operands[0], op.target is scan_to_end
    target = op.args[2] if backward else op.target
    dim, how = op.args[1] % max(x.rank, 1), SCANS[target]
    linear = how.join is aten.add.Tensor and x.rank

    def own(at: LocalOp) -> list[Any]:
        if not backward:
            same = at.same()
            return same if isinstance(same, list) else [same]
        flipped = at.emit(aten.flip.default, at.inputs[0], [dim])
        return [at.emit(aten.flip.default, at.emit(target, flipped, dim, **op.kwargs), [dim])]

    main = replace(along(op), additive=(0,) if linear else (), local=own)
    if x.rank == 0 or x.shape[dim] == 1 or (x.dtype == torch.bool and how.join is None):
        return main

    def local(at: LocalOp) -> Any:
        (f,), results = way.operands[0][dim], own(at)
        if not at.axes(f):
            return results
        if how.join is None:
            results[1] = at.emit(aten.add.Tensor, results[1], at.offset(f))
        totals = [at.emit(aten.narrow.default, node, dim, 0 if backward else at.size(f) - 1, 1) for node in results]
        values = at.gather(totals[0], f)
        places = at.emit(aten.arange.default, at.members(f), dtype=torch.int64)
        apart = at.emit(aten.le.Scalar if backward else aten.ge.Scalar, places, at.position(f))
        apart = at.emit(aten.reshape.default, apart, [at.members(f)] + [1] * x.rank)
        values = at.emit(aten.masked_fill.Scalar, values, apart, finite(how.neutral, at.dtype_of(values)))
        others, *place = (
            at.emit(aten.narrow.default, node, 0, at.members(f) - 1, 1)
            for node in (at.several(target, values, 0) if how.join is None else [at.emit(target, values, 0)])
        )
        if how.join is not None:
            return at.emit(how.join, results[0], at.emit(aten.squeeze.dim, others, 0))
        indices = at.gather(at.emit(aten._to_copy.default, totals[1], dtype=INDEX), f)
        index = at.emit(aten._to_copy.default, at.emit(aten.gather.default, indices, 0, *place), dtype=torch.int64)
        return _later_of(at, results, [at.emit(aten.squeeze.dim, node, 0) for node in (others, index)], target)

    exchanges = 2 if how.join is None else 1
    way = _by_local_results(op, [dim], 1, exchanges, local=local, fills=((0, how.neutral),))
    return replace(main, others=(replace(way, trailing=way.operands[0][dim]),))


def _later_of(at: LocalOp, own: list[Any], before: list[Any], target: Any) -> list[Any]:
    """The running extremes (value, index) of a shard and of those before it: as in torch the last of equal ones counts,
    and of all numbers and NaN, the last NaN."""
    exceeds = aten.ge.Tensor if target is aten.cummax.default else aten.le.Tensor
    kept = at.emit(exceeds, own[0], before[0])
    kept = at.emit(aten.logical_or.default, kept, at.emit(aten.ne.Tensor, own[0], own[0]))
    return [at.emit(aten.where.self, kept, *pair) for pair in zip(own, before)]


def joined(again: Any, neutral: float) -> Entry:
    """The entry of a reduction that gathers the results of shards and reduces these: any and all.

    again: the op for one dim. neutral: the value that changes no result.
    """

    def rule(op: Op) -> Rule:
        chosen, _ = reduced_dims(op)

        def local(at: LocalOp) -> Any:
            node = at.same()
            for d in chosen:
                for f in way.operands[0][d]:
                    if at.axes(f):
                        node = at.emit(again, at.gather(node, f), 0, **op.kwargs)
            return node

        way = _by_local_results(op, chosen, 1, 1, local=local, fills=((0, neutral),))
        return replace(whole_reduction(op), others=(way,))

    return Entry(rule)


OPS: Table = {
    aten.argmax: Entry(extreme, recorded=flatten_first(aten.argmax)),
    aten.argmin: Entry(extreme, recorded=flatten_first(aten.argmin)),
    aten.max.dim: Entry(extreme),
    aten.min.dim: Entry(extreme),
    aten.topk: Entry(topk),
    aten.any: joined(aten.any.dim, 0.0),
    aten.all: joined(aten.all.dim, 1.0),
    scan_to_end: Entry(accumulated),
    **{scan.overloadpacket: Entry(accumulated) for scan in SCANS},
}
