"""Rules of reductions, and of ops that need a whole dim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.rule import Factors, Kind, LocalOp, Rule
from tpshard.parallelism.rules.shape import whole

aten = torch.ops.aten


def _reduced(op: Op, position: int = 1) -> tuple[list[int], bool]:
    rank = op.operands[0].rank
    dims = op.args[position] if len(op.args) > position else op.kwargs.get("dim")
    if isinstance(dims, int):
        dims = [dims]
    chosen = [d % rank for d in dims] if dims else list(range(rank))
    return chosen, op.results[0].rank == rank


def reduce(op: Op, reduction: str = "sum", sharded: Kind = Kind.REDUCE, position: int = 1, local: Any = None) -> Rule:
    """A reduction over dims; if one of them is sharded, the result is partial."""
    chosen, keep = _reduced(op, position)
    factors = Factors()
    source = op.operands[0].shape
    dims = [(factors.new(n, sharded if d in chosen else Kind.PASS),) if n != 1 else () for d, n in enumerate(source)]
    out = tuple(() if d in chosen else dims[d] for d in range(len(dims)) if keep or d not in chosen)
    operands = [tuple(dims)] + [tuple(() for _ in v.shape) for v in op.operands[1:]]
    linear = reduction == "sum" and sharded is Kind.REDUCE
    return factors.rule(
        operands, [out] * len(op.results), reduction=reduction, additive=(0,) if linear else (),
        flops=op.operands[0].numel, local=local, work=tuple(range(len(factors.sizes))),
    )  # fmt: skip


def mean(op: Op) -> Rule:
    """A mean over a sharded dim is the sum of the shards' sums, divided by the whole length."""
    chosen, _ = _reduced(op)
    count = 1
    for d in chosen:
        count *= op.operands[0].shape[d]

    def local(at: LocalOp) -> Any:
        sharded = any(at.axes(f) for f, kind in enumerate(rule.kinds) if kind is Kind.REDUCE)
        if not sharded:
            return at.same()
        keep = op.results[0].rank == op.operands[0].rank
        total = at.emit(aten.sum.dim_IntList, at.inputs[0], chosen, keep, shape=at.shape(), **op.kwargs)
        return at.emit(aten.div.Scalar, total, float(count), shape=at.shape())

    rule = reduce(op, local=local)
    return rule


def whole_reduction(op: Op) -> Rule:
    """argmax, prod, any: computed on whole dims."""
    return reduce(op, sharded=Kind.WHOLE)


def along(op: Op, position: int = 1, default: int = -1) -> Rule:
    """cumsum, sort, topk: the dim is whole, all others pass."""
    dim = op.args[position] if len(op.args) > position else op.kwargs.get("dim", default)
    rank = op.operands[0].rank
    if rank == 0:
        return whole(op, [], additive=())
    linear = op.target is aten.cumsum.default
    return whole(op, [dim], additive=(0,) if linear else ())


def reduction(kind: str) -> Entry:
    """The entry of a reduction by `kind`, whose result is partial if a reduced dim is sharded."""
    return Entry(lambda op: reduce(op, kind))


def ranked(op: Op, position: int = 1) -> Rule:
    """median, mode, kthvalue along a dim: values and their indices."""
    given = op.args[position] if len(op.args) > position else op.kwargs.get("dim", -1)
    return reduce(replace(op, args=(op.args[0], given)), sharded=Kind.WHOLE)


def counted(op: Op) -> Rule:
    """histc(x, bins, min, max): counts of shards add up if the range is given, and not taken from the data."""
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
    aten.max.default: reduction("max"),
    aten.min.default: reduction("min"),
    aten.prod: by_whole,
    aten.any: by_whole,
    aten.all: by_whole,
    aten.cumprod: Entry(along),
    aten.logcumsumexp: Entry(along),
    aten.cummax: Entry(along),
    aten.cummin: Entry(along),
    aten.median.dim: Entry(ranked),
    aten.nanmedian.dim: Entry(ranked),
    aten.mode: Entry(ranked),
    aten.kthvalue: Entry(lambda op: ranked(op, 2)),
    aten.median.default: by_whole,
    aten.nanmedian.default: by_whole,
    aten.histc: Entry(counted),
    aten.sort: Entry(lambda op: along(op, 1)),
}
