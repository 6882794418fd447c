"""Chooses which partial sums stay unreduced after the op that computes them."""

from __future__ import annotations

from collections.abc import Mapping

from tpshard.parallelism.anchors import is_anchor
from tpshard.parallelism.graph import Graph, Op, Value
from tpshard.parallelism.mesh import Axes, covers, union
from tpshard.parallelism.rules.rule import Rule


def carried_sums(
    graph: Graph, rules: Mapping[Op, Rule], natural: Mapping[Value, tuple[Axes, str]]
) -> tuple[dict[Value, Axes], dict[Value, Axes]]:
    """Returns the values that are partial sums when computed, and those of them that stay unreduced, with their axes.

    natural: the values that their op sums over sharded dims, with the axes and the kind of reduction. A value stays
    partial if its only reader is linear in it and has a result that is not larger (or is a widening cast on the way to
    a gradient's storage). It also stays partial if its only reader is an anchor, which reduces it to the anchor's
    layout.
    """
    refused: set[Value] = set()
    while True:
        partial: dict[Value, Axes] = {v: axes for v, (axes, kind) in natural.items() if kind == "sum"}
        for op in graph.ops:
            rule = rules[op]
            if is_anchor(op) or not rule.additive or len(op.results) != 1:
                continue
            added = [op.operands[i] for i in rule.additive]
            parts = [partial.get(v, ()) if v not in refused else () for v in added]
            if not all(parts) and not (op.results[0].rank == 0 and any(parts)):
                continue
            joined = parts[0]
            if op.results[0].rank == 0:
                joined = union(*parts)
            elif any(p != joined for p in parts):
                continue
            own = partial.get(op.results[0], ())
            partial[op.results[0]] = union(own, joined)
        newly = {v for v in partial if v not in refused and not _may_carry(v, partial, rules)}
        if not newly:
            return partial, {v: axes for v, axes in partial.items() if v not in refused}
        refused |= newly


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
