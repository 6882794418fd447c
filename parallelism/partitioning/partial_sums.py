"""Chooses which partial sums stay unreduced after the op that computes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from tpshard.parallelism.anchors import is_anchor
from tpshard.parallelism.graph import Graph, Op, Value
from tpshard.parallelism.mesh import Axes, covers, union
from tpshard.parallelism.rules.rule import Rule

aten = torch.ops.aten


def carried_sums(
    graph: Graph, rules: Mapping[Op, Rule], natural: Mapping[Value, tuple[Axes, str]], ends: Collection[Value] = ()
) -> tuple[dict[Value, Axes], dict[Value, Axes]]:
    """Returns the values that are partial sums when computed, and those of them that stay unreduced, with their axes.

    natural: the values that their op sums over sharded dims, with the axes and the kind of reduction. ends: results
    that may stay partial, those of a body of control flow. A value stays
    partial if its only reader is linear in it and has a result that is not larger (or is a widening cast on the way to
    a gradient's storage). It also stays partial if its only reader is an anchor, which reduces it to the anchor's
    layout. In a chain of additions the first one may add a whole value to a partial one, which the whole value joins as
    a summand of the first device: the chain is reduced once, as the gradient of what several projections read.
    """
    refused: set[Value] = set()
    known: dict[Value, Axes] = {}
    while True:
        partial: dict[Value, Axes] = {v: axes for v, (axes, kind) in natural.items() if kind == "sum"}
        for op in graph.ops:
            rule = rules[op]
            if is_anchor(op) or not rule.additive or len(op.results) != 1:
                continue
            added = [op.operands[i] for i in rule.additive]
            parts = [partial.get(v, ()) if v not in refused else () for v in added]
            begins = len(set(parts) - {()}) == 1 and _begins_a_chain(op, max(parts, key=len), known, refused)
            if not all(parts) and not begins and not (op.results[0].rank == 0 and any(parts)):
                continue
            joined = max(parts, key=len) if begins else parts[0]
            if op.results[0].rank == 0:
                joined = union(*parts)
            elif any(p != joined for p in parts) and not begins:
                continue
            own = partial.get(op.results[0], ())
            partial[op.results[0]] = union(own, joined)
        if partial != known:
            known = partial
            continue
        newly = {
            v for v in partial
            if v not in refused and not (v in ends and not v.users) and not _may_carry(v, partial, rules)
        }  # fmt: skip
        if not newly:
            return partial, {v: axes for v, axes in partial.items() if v not in refused}
        refused, known = refused | newly, {}


def _begins_a_chain(op: Op, axes: Axes, known: Mapping[Value, Axes], refused: Collection[Value]) -> bool:
    """Whether an addition of a whole value and a sum over `axes` is the operand of another, with such a sum."""
    (result,) = op.results
    if op.target is not aten.add.Tensor or len(set(result.users)) != 1 or result in refused:
        return False
    after = result.users[0]
    shapes = {v.shape for v in (*op.operands, *after.operands)}
    others = [v for v in after.operands if v is not result]
    return (
        after.target is aten.add.Tensor and len(op.operands) == 2 and shapes == {result.shape}
        and any(known.get(v) == axes and v not in refused for v in others)
    )  # fmt: skip


def _may_carry(value: Value, partial: Mapping[Value, Axes], rules: Mapping[Op, Rule]) -> bool:
    """Whether a partial value may stay partial through its only reader; see `carried_sums`."""
    readers = set(value.users)
    if len(readers) != 1:
        return False
    (op,) = readers
    if is_anchor(op):
        return True
    rule = rules[op]
    if len(op.results) != 1 or not {i for i, v in enumerate(op.operands) if v is value} <= set(rule.additive):
        return False
    result = op.results[0]
    covered = covers(partial.get(result, ()), partial.get(value, ()))
    if not covered or (partial.get(result) != partial.get(value) and value.rank):
        return False
    return result.bytes <= value.bytes or (result.numel == value.numel and _to_storage(result, rules))


def _to_storage(value: Value, rules: Mapping[Op, Rule]) -> bool:
    """Returns whether only linear ops that keep the number of elements lie between a value and an anchor."""
    while len(set(value.users)) == 1:
        op = value.users[0]
        if is_anchor(op):
            return True
        if not rules[op].additive or op.results[0].numel != value.numel:
            return False
        value = op.results[0]
    return False
