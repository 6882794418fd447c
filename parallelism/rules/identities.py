"""Rules of identity ops, such as `mesh_split` and `boundary`: all shardings and partial sums pass, at no cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tpshard.parallelism.anchors import output
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules import strides
from tpshard.parallelism.rules.entry import Entry, Table, operand
from tpshard.parallelism.rules.rule import Direction, Factors, LocalOp, Rule
from tpshard.parallelism.transfer import copied, recv, send


def forward_operand(local: LocalOp) -> Any:
    """The local form of an identity: the operand's node itself."""
    return local.inputs[0]


def same(op: Op) -> Rule:
    """The rule of an identity: every dim and every partial sum passes."""
    factors = Factors()
    dims = factors.dims(op.results[0].shape, ones=True)
    return factors.rule([dims], [dims], additive=(0,), priority=0, local=forward_operand)


def barrier(op: Op) -> Rule:
    """The rule of propagation_barrier(x, allowed): an identity that axes pass only in the allowed directions."""
    return replace(same(op), direction=Direction[op.args[1].upper()])


identity = Entry(same, view=strides.same, commutes=True)
OPS: Table = {
    output: identity,
    "tpshard.named": identity,
    "tpshard.mesh_split": identity,
    "tpshard.boundary": identity,
    "tpshard.grouped": identity,
    "tpshard.propagation_barrier": replace(identity, rule=barrier),
    "tpshard.role": operand,
    send: identity,
    recv: identity,
    copied: identity,
}
