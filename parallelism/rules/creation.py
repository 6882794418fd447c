"""Rules of ops that read no elements of tensors: each device creates its own shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.rule import Factors, LocalOp, Rule, whole

aten = torch.ops.aten


def explicit(op: Op) -> dict[str, Any]:
    """The keyword arguments of a creation op, with the dtype that torch would infer and a placeholder device."""
    return {**op.kwargs, "dtype": op.results[0].dtype, "device": op.kwargs.get("device") or torch.device("cpu")}


def fill(op: Op) -> Rule:
    """The rule of full, zeros, ones and empty: every device creates its shard."""
    factors = Factors()
    dims = factors.dims(op.results[0].shape)

    def local(at: LocalOp) -> Any:
        return at.with_args(list(at.shape()), *op.args[1:], **explicit(op))

    return factors.rule([], [dims], local=local, priority=0)


def like(op: Op) -> Rule:
    """The rule of ones_like and similar ops, which read only the shape of their operand."""
    factors = Factors()
    dims = factors.dims(op.results[0].shape)
    return factors.rule([dims], [dims], priority=0)


def create(op: Op, target: Any, *args: Any) -> None:
    """Rewrites an op to one that creates the same tensor without operands."""
    op.target, op.args, op.operands = target, args, []
    op.kwargs = {"dtype": op.results[0].dtype, "device": op.kwargs.get("device")}


def new(value: float | None, target: Any = aten.full.default) -> Callable[[Op], None]:
    """Returns a function that rewrites x.new_zeros(size) to zeros(size), as only x's dtype matters. value: the fill."""

    def canonical(op: Op) -> None:
        filling = () if target is not aten.full.default else (op.args[2] if value is None else value,)
        create(op, target, op.args[1], *filling)

    return canonical


def number(value: float | None) -> Callable[[Op], None]:
    """The rewriting of full_like of a tensor without dims to full, so that a partial sum is not read."""

    def canonical(op: Op) -> None:
        if op.results[0].rank == 0 and op.operands and op.operands[0].rank == 0:
            fill = op.args[1] if value is None and len(op.args) > 1 else op.kwargs.get("fill_value", value)
            create(op, aten.full.default, (), fill)

    return canonical


def arange(op: Op) -> Rule:
    """The rule of arange(start, end, step): a device counts from its offset, in integers where the dtype allows."""
    factors = Factors()
    dims = factors.dims(op.results[0].shape)
    kind = op.results[0].dtype
    numbers = [a for a in op.args if isinstance(a, (int, float))]
    start, step = (numbers[0] if len(numbers) > 1 else 0), (numbers[2] if len(numbers) > 2 else 1)
    counting = torch.int64 if isinstance(start, int) and isinstance(step, int) else torch.float64

    def local(at: LocalOp) -> Any:
        if not any(at.axes(f) for dim in dims for f in dim):
            return at.same(**explicit(op))
        (f,) = dims[0]
        positions = at.emit(aten.arange.default, at.size(f), **explicit(op) | {"dtype": torch.int64})
        positions = at.emit(aten.add.Tensor, positions, at.offset(f))
        if counting is torch.float64:
            positions = at.emit(aten._to_copy.default, positions, dtype=counting)
        if step != 1:
            positions = at.emit(aten.mul.Tensor, positions, step)
        if start != 0:
            positions = at.emit(aten.add.Tensor, positions, start)
        return positions if kind is counting else at.emit(aten._to_copy.default, positions, dtype=kind)

    return factors.rule([], [dims], local=local, priority=0)


def without_strides(op: Op) -> None:
    """Rewrites empty_strided(size, stride) to empty(size), since shards are contiguous."""
    op.target, op.args = aten.empty.memory_format, (op.args[0],)


OPS: Table = {
    aten.full: Entry(fill, inlined=True),
    aten.zeros: Entry(fill, inlined=True),
    aten.ones: Entry(fill, inlined=True),
    aten.empty.memory_format: Entry(fill),
    aten.empty_strided: Entry(fill, canonical=without_strides),
    aten.new_zeros: Entry(canonical=new(0), inlined=True),
    aten.new_ones: Entry(canonical=new(1), inlined=True),
    aten.new_full: Entry(canonical=new(None), inlined=True),
    aten.new_empty: Entry(canonical=new(None, aten.empty.memory_format)),
    aten.ones_like: Entry(like, canonical=number(1), inlined=True),
    aten.zeros_like: Entry(like, canonical=number(0), inlined=True),
    aten.full_like: Entry(like, canonical=number(None), inlined=True),
    aten.empty_like: Entry(like, inlined=True),
    aten.arange: Entry(arange, inlined=True),
    aten.scalar_tensor: Entry(whole, inlined=True),
}
