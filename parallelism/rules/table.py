"""The op table: one entry per op, in a file for each theme. A new op is one line in one of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules import (
    attention_rule,
    by_index,
    contraction,
    control_flow_rule,
    creation,
    decomposed,
    drawn,
    elementwise,
    experts_rule,
    fp8_rule,
    identities,
    indexing,
    kernel_costs,
    lookups,
    matrices,
    optimizers,
    paged,
    pieces,
    pooling,
    quantized_rule,
    recurrence_rule,
    reduction,
    resizing,
    selection,
    shape,
    states,
    windows,
)
from tpshard.parallelism.rules.entry import Entry, random
from tpshard.parallelism.rules.rule import Rule, whole

THEMES = (
    contraction, elementwise, shape, pieces, reduction, selection, indexing, by_index, creation, drawn, attention_rule,
    paged, states, experts_rule, fp8_rule, quantized_rule, identities, windows, resizing, pooling, matrices, lookups,
    optimizers, recurrence_rule, control_flow_rule, decomposed, kernel_costs,
)  # fmt: skip
OTHER = Entry(dense="all")
"""The entry of an op that is not in the table."""


def name_of(target: Any) -> str:
    """The name of a target: `aten.mm` for an op, `aten.max.dim` for one overload, `contract` for a function."""
    return str(target) if isinstance(target, (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket)) else (
        getattr(target, "__name__", str(target))
    )  # fmt: skip


TABLE: dict[str, Entry] = {name_of(key): entry for theme in THEMES for key, entry in theme.OPS.items()}


@cache
def entry_of(target: Any) -> Entry:
    """The entry of an op, or of a function that is the target of a node.

    Without an entry, torch's tags identify pointwise and random ops, and an in-place op gets the entry of its
    out-of-place form; other ops get `OTHER`.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return OTHER if isinstance(target, str) else TABLE.get(name_of(target), OTHER)
    packet = str(target.overloadpacket)
    for name in (str(target), packet, packet.removesuffix("_")):
        if name in TABLE:
            return TABLE[name]
    if torch.Tag.nondeterministic_seeded in target.tags:
        return random
    if torch.Tag.pointwise in target.tags and not target._schema.is_mutable:
        return elementwise.pointwise()
    return OTHER


def rule_for(op: Op) -> Rule:
    """The rule of one call; with all dims whole (and `has_rule` False) for an op without an entry.

    A call with a tensor of no elements keeps its rule only if the op is pointwise or a view, or its entry says so.
    """
    entry = entry_of(op.target)
    if entry.empty or not any(0 in value.shape for value in (*op.operands, *op.results)):
        return entry.rule(op)
    rule = entry.rule(op) if entry.commutes else whole(op)
    return rule if rule.priority == 0 else whole(op)
