"""Rules of optimizers' steps, which are pointwise, and of the sum of a gradient's squares."""

from __future__ import annotations

from dataclasses import replace

from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.elementwise import elements
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.letters import letters
from tpshard.parallelism.rules.rule import Rule


def step(flops: int) -> Entry:
    """The entry of an optimizer's step, which takes `flops` FLOPs per element of a parameter.

    No operand may be a partial sum.
    """

    def rule(op: Op) -> Rule:
        pointwise = elements(op)
        return replace(pointwise, flops=flops * pointwise.flops)

    return Entry(rule, commutes=True)


OPS: Table = {
    "tpshard.adamw_step": step(15),
    "tpshard.lion_step": step(11),
    # the sum of (x * scale)^2: no partial sum may be squared
    "tpshard.square_sum": letters("...,->", flops=lambda op: 3 * op.operands[0].numel),
}
