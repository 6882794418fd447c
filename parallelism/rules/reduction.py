"""Rules of reductions, and of ops that need a whole dim."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.rule import Factors, Kind, LocalOp, Rule
from tpshard.parallelism.rules.shape import whole

aten = torch.ops.aten


def reduced_dims(op: Op, position: int = 1) -> tuple[list[int], bool]:
    """The dims that an op reduces, argument `position`, and whether the result keeps them."""
    rank = op.operands[0].rank
    dims = op.args[position] if len(op.args) > position else op.kwargs.get("dim")
    if isinstance(dims, int):
        dims = [dims]
    chosen = [d % rank for d in dims] if dims else list(range(rank))
    return chosen, op.results[0].rank == rank


def reduce(op: Op, reduction: str = "sum", sharded: Kind = Kind.REDUCE, position: int = 1, local: Any = None) -> Rule:
    """The rule of a reduction over dims: over a sharded one the result is partial."""
    chosen, keep = reduced_dims(op, position)
    factors = Factors()
    dims = factors.dims(op.operands[0].shape, sharded, only=chosen)
    out = tuple(() if d in chosen else dims[d] for d in range(len(dims)) if keep or d not in chosen)
    operands = [dims] + [tuple(() for _ in v.shape) for v in op.operands[1:]]
    linear = reduction == "sum" and sharded is Kind.REDUCE
    return factors.rule(
        operands, [out] * len(op.results), reduction=reduction, additive=(0,) if linear else (),
        flops=op.operands[0].numel, local=local, work=tuple(range(len(factors.sizes))),
    )  # fmt: skip


def mean(op: Op) -> Rule:
    """The rule of mean: over a sharded dim, a device returns its sum divided by the whole length, a partial sum."""
    chosen, _ = reduced_dims(op)
    count = math.prod(op.operands[0].shape[d] for d in chosen)

    def local(at: LocalOp) -> Any:
        if not any(at.axes(f) for f, kind in enumerate(rule.kinds) if kind is Kind.REDUCE):
            return at.same()
        keep = op.results[0].rank == op.operands[0].rank
        total = at.emit(aten.sum.dim_IntList, at.inputs[0], chosen, keep, **op.kwargs)
        return at.emit(aten.div.Scalar, total, float(count))

    rule = reduce(op, local=local)
    return rule


def whole_reduction(op: Op) -> Rule:
    """The rule of reductions that need whole dims: medians, and argmax where no other way is cheaper."""
    return reduce(op, sharded=Kind.WHOLE)


def along(op: Op, position: int = 1) -> Rule:
    """The rule of ops along a dim that must be whole: sort, topk."""
    dim = op.args[position] if len(op.args) > position else op.kwargs.get("dim", -1)
    rank = op.operands[0].rank
    return whole(op, [dim] if rank else [], additive=())


def reduction(kind: str) -> Entry:
    """The entry of a reduction by `kind`, whose result is partial if a reduced dim is sharded."""
    return Entry(lambda op: reduce(op, kind))


def order_statistic(op: Op, position: int = 1) -> Rule:
    """The rule of median, mode and kthvalue along a dim, which must be whole."""
    dim = op.args[position] if len(op.args) > position else op.kwargs.get("dim", -1)
    return reduce(replace(op, args=(op.args[0], dim)), sharded=Kind.WHOLE)


def histogram(op: Op) -> Rule:
    """The rule of histc(x, bins, min, max): the counts of shards are summed, unless the range comes from the data."""
    low, high = (op.args[i] if len(op.args) > i else op.kwargs.get(name, 0) for i, name in ((2, "min"), (3, "max")))
    factors = Factors()
    x = factors.dims(op.operands[0].shape, Kind.REDUCE if low != high else Kind.WHOLE)
    result = factors.dims(op.results[0].shape, Kind.WHOLE)
    return factors.rule([x], [result], fills=((0, high + 1),))  # outside of the range, so not counted


by_whole = Entry(whole_reduction)
OPS: Table = {
    aten.sum: reduction("sum"),
    aten.mean: Entry(mean),
    aten.amax: reduction("max"),
    aten.amin: reduction("min"),
    aten.prod: reduction("product"),
    aten.max.default: reduction("max"),
    aten.min.default: reduction("min"),
    aten.median.dim: Entry(order_statistic),
    aten.nanmedian.dim: Entry(order_statistic),
    aten.mode: Entry(order_statistic),
    aten.kthvalue: Entry(lambda op: order_statistic(op, 2)),
    aten.median.default: by_whole,
    aten.nanmedian.default: by_whole,
    aten.histc: Entry(histogram),
    aten.sort: Entry(along),
}
