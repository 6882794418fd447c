"""Rules of lookups and updates by index: each device masks the indices that it does not own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tpshard.parallelism.graph import Op, Ref
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.letters import letters
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule
from tpshard.parallelism.rules.shape import whole

aten = torch.ops.aten


def finite(number: float, dtype: torch.dtype) -> float:
    """The number, or in place of an infinite one the largest or the smallest integer of a dtype without infinity."""
    if dtype.is_floating_point or dtype.is_complex or abs(number) != math.inf:
        return number
    return torch.iinfo(dtype).max if number > 0 else torch.iinfo(dtype).min


def own_indices(at: LocalOp, index: Any, factor: int) -> tuple[Any, Any]:
    """The indices relative to this device's shard, with those of other devices set to 0, and the mask of the latter."""
    shifted = at.emit(aten.sub.Tensor, index, at.offset(factor))
    below = at.emit(aten.lt.Scalar, shifted, 0)
    above = at.emit(aten.ge.Scalar, shifted, at.valid(factor))
    foreign = at.emit(aten.logical_or.default, below, above)
    return at.emit(aten.masked_fill.Scalar, shifted, foreign, 0), foreign


def without_foreign(at: LocalOp, node: Any, foreign: Any, view: Sequence[int]) -> Any:
    """The node with 0 where the mask of other devices' indices is true; `view` is a shape in which it broadcasts."""
    mask = at.emit(aten.reshape.default, foreign, list(view))
    return at.emit(aten.masked_fill.Scalar, node, mask, 0)


def pick_own(at: LocalOp, index: Any, factor: int, dim: int) -> Any:
    """The positions `index` of a dim of the first operand; 0 for those of other devices."""
    own, foreign = own_indices(at, index, factor)
    picked = at.emit(aten.index_select.default, at.inputs[0], dim, own)
    shape = at.shape_of(picked)
    return without_foreign(at, picked, foreign, [n if d == dim else 1 for d, n in enumerate(shape)])


def write_own(at: LocalOp, target: Any, dim: int, size: int, write: Callable[[Any], Any]) -> Any:
    """Writes into a target with one more position of a dim than its `size`; foreign values go there and are cut off."""
    widths = [0, 0] * (len(at.shape_of(target)) - 1 - dim) + [0, 1]
    written = write(at.emit(aten.constant_pad_nd.default, target, widths, 0))
    return at.emit(aten.slice.Tensor, written, dim, 0, size)


def _for_rows(at: LocalOp, mask: Any) -> Any:
    """A mask of indices as one of the rows that they look up."""
    return at.emit(aten.unsqueeze.default, mask, len(at.shape_of(mask)))


def embedding(at: LocalOp, of: Mapping[str, int]) -> Any:
    """The local form of embedding: a device of a sharded vocabulary v looks up its own rows; others are 0."""
    if not at.axes(of["v"]):
        return at.same()
    rows, foreign = own_indices(at, at.inputs[1], of["v"])
    looked_up = at.emit(aten.embedding.default, at.inputs[0], rows)
    return at.emit(aten.masked_fill.Scalar, looked_up, _for_rows(at, foreign), 0)


def embedding_backward(op: Op) -> Rule:
    """The rule of embedding_dense_backward: a device of a sharded vocabulary adds only its own rows to the gradient."""
    grad, index = op.operands
    out = op.results[0]
    factors = Factors()
    rows = factors.dims(index.shape, Kind.REDUCE)
    v = factors.new(out.shape[0])
    d = factors.dims(out.shape[1:])

    def local(at: LocalOp) -> Any:
        padding, scale = op.args[3], op.args[4]
        if not at.axes(v):
            return at.with_args(Ref(0), Ref(1), at.size(v), padding, scale)
        local_rows, foreign = own_indices(at, at.inputs[1], v)
        if padding >= 0:  # an index into the whole table, whose row gets no gradient
            foreign = at.emit(aten.logical_or.default, foreign, at.emit(aten.eq.Scalar, at.inputs[1], padding))
        own_grad = at.emit(aten.masked_fill.Scalar, at.inputs[0], _for_rows(at, foreign), 0)
        return at.emit(op.target, own_grad, local_rows, at.size(v), -1, scale)

    return factors.rule(
        [(*rows, *d), rows], [((v,), *d)], local=local, additive=(0,), flops=grad.numel, fills=((1, 0),)
    )


def embedding_scaled(grad: Tensor, index: Tensor, rows: int, padding: int, scale: bool) -> Tensor:
    """Computes embedding_dense_backward with `scale_grad_by_freq` as sums divided by the numbers of lookups."""
    if not scale:
        return NotImplemented
    counts = grad.new_zeros(rows).scatter_add(0, index.reshape(-1), grad.new_ones(index.numel()))
    return aten.embedding_dense_backward.default(grad, index, rows, padding, False) / counts.clamp(min=1).unsqueeze(1)


def index_select(op: Op) -> Rule:
    """The rule of x.index_select(dim, index), an embedding lookup along any dim."""
    x, index = op.operands
    dim = op.args[1] % max(x.rank, 1)
    factors = Factors()
    v = factors.new(x.shape[dim], Kind.REDUCE)
    picked = factors.dims(index.shape)
    before, behind = factors.dims(x.shape[:dim]), factors.dims(x.shape[dim + 1 :])

    def local(at: LocalOp) -> Any:
        return pick_own(at, at.inputs[1], v, dim) if at.axes(v) else at.same()

    source, out = (*before, (v,), *behind), (*before, *(picked or ((),)), *behind)
    return factors.rule([source, picked], [out], local=local, fills=((1, 0),), guarded=(v,))


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
        local_rows, foreign = own_indices(at, at.inputs[1], v)
        looked_up = at.emit(op.target, at.inputs[0], dim, local_rows)
        return at.emit(aten.masked_fill.Scalar, looked_up, foreign, 0)

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


PARTIAL = {"amax": "max", "amin": "min", "prod": "product"}
"""How partial results of scatter_reduce over a sharded source are combined."""


def scatter(op: Op) -> Rule:
    """The rule of scatter, scatter_add and scatter_reduce.

    What is added, or of which the extreme counts, may be sharded instead of x: results of devices are then reduced.
    """
    name, main = op.target.overloadpacket.__name__, indexed_write(op, Kind.WHOLE)
    how = "sum" if name == "scatter_add" else PARTIAL.get(op.args[4], "") if name == "scatter_reduce" else ""
    if not how or not op.operands[0].rank or not include_self(op.args, op.kwargs):
        return main
    return replace(main, others=(indexed_write(op, Kind.REDUCE, how),))


def include_self(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether scatter_reduce includes the elements of x in what it reduces."""
    included: bool = args[5] if len(args) > 5 else kwargs.get("include_self", True)
    return included


def indexed_write(op: Op, kind: Kind, how: str = "sum") -> Rule:
    """The rule of one scatter: a device of a sharded dim writes only its own elements. Along that dim, the index is of
    `kind`: whole, or reduced (`how`)."""
    x, index = op.operands[:2]
    src = op.operands[2] if len(op.operands) > 2 else None
    if x.rank == 0 or (src is not None and src.shape != index.shape):
        return whole(op, range(x.rank), additive=())
    dim = op.args[1] % x.rank
    adds = "scatter_add" in op.target.overloadpacket.__name__
    factors, multiplies = Factors(), how == "product"
    v = factors.new(x.shape[dim])
    target, of_source = _dims_along(factors, op, dim, v, kind)

    def local(at: LocalOp) -> Any:
        parts = [f for f in of_source[dim] if at.axes(f)]
        for f in parts if adds or multiplies else ():  # x itself counts once
            at.inputs[0] = at.emit(aten.mul.Tensor if adds else aten.pow.Tensor_Scalar, at.inputs[0], at.first(f))
        return written(at) if at.axes(v) else at.same()

    def written(at: LocalOp) -> Any:
        local_rows, foreign = own_indices(at, at.inputs[1], v)
        if adds:
            own_source = at.emit(aten.masked_fill.Scalar, at.inputs[2], foreign, 0)
            return at.emit(op.target, at.inputs[0], dim, local_rows, own_source)
        edge = at.emit(aten.masked_fill.Scalar, local_rows, foreign, at.size(v))
        rest = (at.inputs[2] if src is not None else op.args[3], *op.args[4:])
        return write_own(
            at, at.inputs[0], dim, at.size(v), lambda grown: at.emit(op.target, grown, dim, edge, *rest, **op.kwargs)
        )

    operands = [target, of_source] + ([of_source] if src is not None else [])
    return factors.rule(
        operands, [target], local=local, additive=(0, 2) if adds else (), fills=((1, 0),), reduction=how
    )  # fmt: skip


def scatter_reduced(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:  # fmt: skip
    """Computes scatter_reduce by sums, or, where x itself does not count, from a value that changes no result."""
    how = {"add": "sum", "multiply": "prod"}.get(reduce, reduce)
    for d, n in enumerate(index.shape):
        src = src if src.shape[d] == n else src.narrow(d, 0, n)
    if how == "sum" and include_self:
        return x.scatter_add(dim, index, src)
    if how == "mean" and x.is_floating_point():
        counts = torch.full_like(x, int(include_self)).scatter_add(dim, index, torch.ones_like(src))
        sums = (x if include_self else torch.zeros_like(x)).scatter_add(dim, index, src)
        return torch.where(counts == 0, x, sums / counts.clamp(min=1))
    if how == "mean" or include_self:
        return NotImplemented if how == reduce else x.scatter_reduce(dim, index, src, how)
    neutral = torch.full_like(x, finite({"sum": 0, "prod": 1, "amax": -math.inf, "amin": math.inf}[how], x.dtype))
    marks = torch.ones_like(src, dtype=torch.uint8)
    written = torch.zeros_like(x, dtype=torch.uint8).scatter_reduce(dim, index, marks, "amax")
    reduced = neutral.scatter_add(dim, index, src) if how == "sum" else neutral.scatter_reduce(dim, index, src, how)
    return torch.where(written == 0, x, reduced)


def index_reduced(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:  # fmt: skip
    """Computes index_reduce as a scatter_reduce whose index is the same along the other dims."""
    if x.dim() == 0:
        return NotImplemented
    along = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    return x.scatter_reduce(dim, index.view(along).expand(source.shape), source, reduce, include_self=include_self)


OPS: Table = {
    aten.embedding: letters("vd,...->...d", local=embedding, guarded="v", fills=((1, 0),), lookup=True),
    aten.embedding_dense_backward: Entry(embedding_backward, recorded=embedding_scaled),
    aten.index_select: Entry(index_select, lookup=True, commutes=True),
    aten.gather: Entry(gather, lookup=True),
    aten.scatter.value: Entry(scatter),
    aten.scatter.src: Entry(scatter),
    aten.scatter_add: Entry(scatter),
    aten.scatter.reduce: Entry(recorded=scatter_reduced),
    aten.scatter_reduce: Entry(scatter, recorded=scatter_reduced),
    aten.index_reduce: Entry(recorded=index_reduced),
}
