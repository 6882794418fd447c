"""Rules of pointwise ops, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tpshard.parallelism.graph import Op, Ref
from tpshard.parallelism.rules.decompositions import copy_over
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.rule import Factors, Rule, broadcast
from tpshard.parallelism.rules.shape import as_view

aten = torch.ops.aten
Sums = Callable[[Op], tuple[int, ...]]
"""A function that returns the operands in which an op is jointly linear, so that it may leave them partial sums."""


def elements(op: Op, additive: tuple[int, ...] = (), fills: tuple[tuple[int, float], ...] = ()) -> Rule:
    """The rule of a result whose elements depend on one element of each operand; size-1 dims broadcast."""
    factors = Factors()
    out = op.results[0]
    dims = factors.dims(out.shape, ones=True)
    operands = [broadcast(v.shape, out.shape, dims) for v in op.operands]
    return factors.rule(operands, [dims] * len(op.results), additive=additive, priority=0, flops=out.numel, fills=fills)


# ---- which operands may be partial --------------------------------------------------------------------------------
def nothing(op: Op) -> tuple[int, ...]:
    """Returns no operands: the op is not linear, so its operands' partial sums are reduced before it."""
    return ()


def first(op: Op) -> tuple[int, ...]:
    """The operands in which an op of one operand (neg, clone) is linear: that one."""
    return (0,)


def cast(op: Op) -> tuple[int, ...]:
    """The operands in which a cast is linear: its own, up to rounding, but none for a cast to integers."""
    return (0,) if op.results[0].dtype.is_floating_point or op.operands[0].dtype == op.results[0].dtype else ()


def sum_of(op: Op) -> tuple[int, ...]:
    """The operands in which a + alpha b is linear: jointly two tensors of one shape, but none with a number."""
    tensors = [a for a in op.args[:2] if isinstance(a, Ref)]
    both = len(tensors) == 2 and op.operands[0].shape == op.operands[1].shape
    return (0, 1) if both else ()


def product(op: Op) -> tuple[int, ...]:
    """The operands in which a * b and a / b are linear: `a` if `b` is a number or a tensor without dims."""
    if op.kwargs.get("rounding_mode") is not None:
        return ()
    number = len(op.operands) == 1 or (op.operands[1].rank == 0 and op.operands[0].rank > 0)
    return (0,) if number and isinstance(op.args[0], Ref) else ()


def zero_fill(op: Op) -> tuple[int, ...]:
    """The operands in which masked_fill(x, mask, value) is linear: x for value 0, since every partial sum is filled."""
    return (0,) if op.args[2] == 0 else ()


def divisor(op: Op) -> tuple[tuple[int, float], ...]:
    """The padding of a divisor: 1 for integers, which must not be divided by the 0 that padding may hold."""
    by = op.args[1]
    return ((by.index, 1),) if isinstance(by, Ref) and not op.results[0].dtype.is_floating_point else ()


def drop_format(op: Op) -> None:
    """Rewrites a copy in another memory format to a view, since graphs do not record memory formats."""
    if op.kwargs.get("memory_format") is not None:
        as_view(op)


def pointwise(sums: Sums = nothing, *, divides: bool = False, exponentials: int = 0, **facts: Any) -> Entry:
    """The entry of an op whose result has one element per element of its (broadcast) operands."""
    return Entry(
        lambda op: elements(op, sums(op), divisor(op) if divides else ()),
        inlined=True, commutes=True, exponentials=exponentials, **facts,
    )  # fmt: skip


OPS: Table = {
    aten.add: pointwise(sum_of),
    aten.sub: pointwise(sum_of),
    aten.mul: pointwise(product),
    aten.div: pointwise(product, divides=True),
    aten.floor_divide: pointwise(divides=True),
    aten.remainder: pointwise(divides=True),
    aten.fmod: pointwise(divides=True),
    aten.neg: pointwise(first),
    aten.clone: pointwise(first, canonical=drop_format),
    aten._to_copy: pointwise(cast),
    aten.masked_fill.Scalar: pointwise(zero_fill),
    aten.copy: pointwise(recorded=copy_over),
    aten.exp: pointwise(exponentials=1),
    aten.log: pointwise(exponentials=1),
    aten.tanh: pointwise(exponentials=1),
    aten.sigmoid: pointwise(exponentials=1),
    aten.silu: pointwise(exponentials=1),
    aten.gelu: pointwise(exponentials=1),
    aten.silu_backward: pointwise(exponentials=1),
    aten.gelu_backward: pointwise(exponentials=1),
    aten.sigmoid_backward: pointwise(),
    aten.tanh_backward: pointwise(),
    aten.threshold_backward: pointwise(),
}
"""Ops that torch tags as pointwise are treated as such, without passing partial sums."""
