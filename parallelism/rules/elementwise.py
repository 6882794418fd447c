"""Pointwise ops, with broadcasting, and the identities that carry names and annotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpshard.parallelism.graph import Op, Ref
from tpshard.parallelism.rules.rule import Dim, Factors, LocalOp, Rule


def broadcast_dims(factors: Factors, shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> tuple[
    list[tuple[Dim, ...]], tuple[Dim, ...]
]:
    """Factors of operands that broadcast (aligned at the last dim) to `out`."""
    result = factors.dims(out)
    operands = []
    for shape in shapes:
        lead = len(out) - len(shape)
        operands.append(tuple(result[lead + i] if n == out[lead + i] else () for i, n in enumerate(shape)))
    return operands, result


def pointwise(op: Op, additive: tuple[int, ...] = (), cost: int = 1, view: bool = False) -> Rule:
    """One result element from one element of each operand; operands of size 1 broadcast."""
    factors = Factors()
    out = op.results[0].shape
    operands, result = broadcast_dims(factors, [v.shape for v in op.operands], out)
    return factors.rule(
        operands, [result] * len(op.results), additive=additive, priority=0,
        flops=0 if view else cost * op.results[0].numel,
        local=forward_operand if view else None, view=view, padded=True,
    )  # fmt: skip


def forward_operand(local: LocalOp) -> Any:
    return local.inputs[0]


def linear(op: Op) -> Rule:
    """Pointwise in one operand and linear in it: neg, cast, clone."""
    return pointwise(op, additive=(0,))


def identity(op: Op) -> Rule:
    """Names and annotations: no work, partial sums pass."""
    return pointwise(op, additive=(0,), view=True)


def add(op: Op) -> Rule:
    """a + alpha b: a sum of partial sums is one; with a plain number added it is not."""
    tensors = [a for a in op.args[:2] if isinstance(a, Ref)]
    both = len(tensors) == 2 and op.operands[0].shape == op.operands[1].shape
    return pointwise(op, additive=(0, 1) if both else ())


def multiply(op: Op) -> Rule:
    """a * b and a / b: linear in `a` where `b` is a number or a tensor of no dims."""
    scalar = len(op.operands) == 1 or (op.operands[1].rank == 0 and op.operands[0].rank > 0)
    first = isinstance(op.args[0], Ref)
    return pointwise(op, additive=(0,) if scalar and first else ())


def same_shape_creation(op: Op) -> Rule:
    """ones_like and its kin: the operand only lends its shape."""
    factors = Factors()
    dims = factors.dims(op.results[0].shape)
    return factors.rule([dims], [dims], priority=0)
