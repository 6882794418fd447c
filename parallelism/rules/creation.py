"""Ops without tensor operands: each device makes its own part."""

from __future__ import annotations

from typing import Any

import torch
from tpshard.parallelism.graph import Op, Ref
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.rule import Factors, LocalOp, Rule, whole

aten = torch.ops.aten


def filled(op: Op) -> Rule:
    """full, zeros, ones, empty: the sizes become local."""
    factors = Factors()
    dims = factors.dims(op.results[0].shape)

    def local(at: LocalOp) -> Any:
        return at.with_args(list(at.shape()), *op.args[1:])

    return factors.rule([], [dims], local=local, priority=0)


def new_filled(op: Op) -> Rule:
    """x.new_zeros(size): only the dtype of x matters."""
    factors = Factors()
    dims = factors.dims(op.results[0].shape)

    def local(at: LocalOp) -> Any:
        return at.with_args(Ref(0), list(at.shape()), *op.args[2:])

    return factors.rule([tuple(() for _ in op.operands[0].shape)], [dims], local=local, priority=0)


def arange(op: Op) -> Rule:
    """Positions: a device's part starts at its offset."""
    factors = Factors()
    size = op.results[0].shape[0]
    f = factors.new(size)

    def local(at: LocalOp) -> Any:
        if not at.axes(f):
            return at.same()
        numbers = [a for a in op.args if isinstance(a, (int, float))]
        start, step = (numbers[0] if len(numbers) > 1 else 0), (numbers[2] if len(numbers) > 2 else 1)
        kwargs = dict(op.kwargs)
        kwargs["dtype"] = op.results[0].dtype
        made = at.emit(aten.arange.start_step, 0, at.size(f) * step, step, shape=at.shape(), **kwargs)
        first = at.offset(f) if step == 1 else at.emit(_times, at.offset(f), step, shape=())
        moved = at.emit(aten.add.Tensor, made, first, shape=at.shape())
        return moved if start == 0 else at.emit(aten.add.Tensor, moved, start, shape=at.shape())

    return factors.rule([], [((f,),)], local=local, priority=0)


def _times(a: int, b: int) -> int:
    return a * b


OPS: Table = {
    aten.full: Entry(filled, inlined=True),
    aten.zeros: Entry(filled, inlined=True),
    aten.ones: Entry(filled, inlined=True),
    aten.empty.memory_format: Entry(filled),
    aten.new_zeros: Entry(new_filled, inlined=True),
    aten.new_ones: Entry(new_filled, inlined=True),
    aten.new_full: Entry(new_filled, inlined=True),
    aten.new_empty: Entry(new_filled),
    aten.arange: Entry(arange, inlined=True),
    aten.scalar_tensor: Entry(whole, inlined=True),
}
