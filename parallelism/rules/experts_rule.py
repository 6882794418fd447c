"""Rules of mixture-of-experts ops: products of tokens with experts' matrices, and copies of tokens to slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tpshard.parallelism.graph import Op, Ref
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.letters import Local, letters, rule_of
from tpshard.parallelism.rules.rule import LocalOp, Rule

aten = torch.ops.aten
EXPERTS = "...M,...K,...K,ehM,ehM,eMh"
"""Tokens, the ids of their experts and the weights of these, and all experts' matrices gate, up and down.

Experts e and hidden columns h may be sharded, and are summed over. A device with some of the experts computes them for
the tokens of all devices along these axes, and returns a partial sum. The gradients of the matrices are summed over
tokens.
"""
GROUPED = "g...M,g...K,g...K,gehM,gehM,geMh"
"""The same for tokens in groups, each with experts of its own."""
ROWS = "...ki"
"""Rows that experts' matrices multiply: one for each choice of a token, or (of size 1) one for all of them."""


def own_experts(ids: int) -> Local:
    """Returns the local form of an op whose operand `ids` holds experts: less the number of this device's first one.

    The ids of other devices' experts are then out of range.
    """

    def local(at: LocalOp, of: Mapping[str, int]) -> Any:
        if at.axes(of["e"]):
            at.inputs[ids] = at.emit(aten.sub.Tensor, at.inputs[ids], at.offset(of["e"]))
        return at.same()

    return local


def own_sums(at: LocalOp, of: Mapping[str, int]) -> Any:
    """The local form of `expert_outer(dout, x, ids, experts)`, which returns this device's experts' matrices."""
    ids = at.emit(aten.sub.Tensor, at.inputs[2], at.offset(of["e"])) if at.axes(of["e"]) else Ref(2)
    return at.with_args(Ref(0), Ref(1), ids, at.size(of["e"]))


def products(op: Op, count: int) -> int:
    """The FLOPs of `count` products of every choice with a matrix of its expert, whose sizes are the last operand's."""
    ids = next(value for value in op.operands if not value.dtype.is_floating_point)
    used = next((arg for arg in op.args if isinstance(arg, float)), 1.0)
    return round(2 * count * ids.numel * used) * op.operands[-1].shape[-2] * op.operands[-1].shape[-1]


def all_products(count: int, ids: int, before: str, after: str) -> Entry:
    """The entry of `experts` or its gradient, with `count` products of every choice. ids: the operand with experts.
    before, after: the letters of further operands, and of results beside the tokens."""

    def rule(op: Op) -> Rule:
        group = "g" if len(op.operands[-1].shape) > 3 else ""
        text = f"{before and group + before}{GROUPED if group else EXPERTS}->{group}...M"
        results = "".join(f",{group}{result}" for result in after.split(",") if result)
        return rule_of(op, text + results, flops=products(op, count), local=own_experts(ids), guarded="e")

    return Entry(rule, work="matmul", saved=True, routed=3)


def outer_products(op: Op) -> int:
    """The FLOPs of `expert_outer(dout, x, ids, experts)`."""
    grad, x, ids = op.operands
    return 2 * ids.numel * grad.shape[-1] * x.shape[-1]


def copies(op: Op) -> int:
    """The FLOPs of copies between tokens and slots: a product and a sum for each element of the result."""
    return 2 * op.results[0].numel


OPS: Table = {
    "tpshard.experts": all_products(3, 1, "", ""),
    "tpshard.experts_backward": all_products(8, 2, "...M,", "...K,ehM,ehM,eMh"),  # computes the hidden values again
    "tpshard.expert_linear": letters(
        f"{ROWS},...k,eoi->...ko", linear="0", flops=lambda op: products(op, 1), local=own_experts(1), guarded="e",
        work="matmul", saved=True, routed=1,
    ),
    "tpshard.expert_outer": letters(
        f"...ko,{ROWS},...k->eoi", flops=outer_products, local=own_sums, work="matmul", saved=True
    ),
    # any token s may go to any slot N of its sequence b, so that only sequences and columns may be sharded
    "tpshard.to_slots": letters("bSm,bSK,bSK->bNm", linear="0", flops=copies, fills=((1, 0),)),
    "tpshard.from_slots": letters("bNm,bSK,bSK->bSm", linear="0", flops=copies, fills=((1, 0),)),
    "tpshard.slot_products": letters("bSm,bNm,bSK->bSK", flops=copies, fills=((2, 0),)),
}  # fmt: skip
