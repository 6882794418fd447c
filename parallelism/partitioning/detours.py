"""Finding values whose propagated layout only causes reshards: to it after the producer, from it by all readers.

Propagation settles each value before it knows all its neighbours: a weight may shard a result's columns before the
batch of the activation beside it is known. If the op that computes the value and every op that reads it then agree on
another layout, the propagated one only costs two reshards. Likewise if several ops read one value, and the result of
each is resharded: to reshard what they read (queries', keys' and values' common input) may cost less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from tpshard.parallelism.anchors import is_anchor
from tpshard.parallelism.graph import Graph, Op, Value
from tpshard.parallelism.mesh import size_of
from tpshard.parallelism.partitioning.choose import (
    FLOPS_PER_BYTE,
    Choice,
    choice_for,
    layout_of,
    made_for,
    share,
)
from tpshard.parallelism.resharding.reshard import cost, redistribution
from tpshard.parallelism.rules.rule import Rule
from tpshard.parallelism.sharding import Layout


class Detours(NamedTuple):
    """What saves reshards."""

    layouts: dict[Value, Layout]
    """Other layouts than the propagated ones, by value."""
    sharers: dict[Value, dict[Layout, set[Op]]]
    """The ops that then read a value in another layout, which is resharded to it once for all of them."""


def detours(
    graph: Graph,
    rules: Mapping[Op, Rule],
    choices: Mapping[Op, Choice],
    propagated: Mapping[Value, Layout],
    computed: Mapping[Value, Layout],
    fixed: Collection[Value],
) -> Detours:
    """Finds the values whose propagated layout only causes reshards.

    choices: the cuts in which each op computes under the propagated layouts. computed: the layout of each result under
    them. fixed: annotated values, which keep their layout.
    """
    needs: dict[Value, set[Layout]] = {}
    better: dict[Value, Layout] = {}
    made: dict[Value, Layout] = {}
    """What is made from nothing, in the layout that its reader needs."""
    through: dict[Op, list[Layout]] = {}
    """The operands' layouts of pass-through ops that compute their result in its better layout."""
    together: dict[tuple[Value, Layout], list[tuple[Op, Choice]]] = {}
    """Other ops and how they would, by the one operand that they then need in another layout, and that layout."""
    for op in reversed(graph.ops):
        if is_anchor(op):
            for value in op.operands:
                needs.setdefault(value, set()).add(propagated[op.results[0]])
            continue
        rule = rules[op]
        needed = [layout_of(rule, dims, choices[op], False) for dims in rule.operands]
        for result in op.results:
            layouts = needs.get(result, set())
            if len(layouts) != 1 or result in fixed:
                continue
            (layout,) = layouts
            if layout == propagated[result]:
                continue
            if len(result.users) == 1 and made_for(result, result.users[0]):
                if choice_for(op, rule, 0, layout) is not None:
                    made[result] = layout
                continue
            if rule.priority == 0 and len(op.results) == 1:
                choice = choice_for(op, rule, 0, layout)
                if choice is None:
                    continue
                needed = through[op] = [layout_of(rule, dims, choice, False) for dims in rule.operands]
            elif len(op.results) == 1 and computed[result] == propagated[result]:
                choice = choice_for(op, rule, 0, layout)
                ends = [] if choice is None else _other_operands(op, rule, choice, propagated)
                if choice is not None and len(ends) == 1 and _divided(rule, choice) >= _divided(rule, choices[op]):
                    together.setdefault(ends[0], []).append((op, choice))
            better[result] = layout
        for value, needed_layout in zip(op.operands, needed):
            needs.setdefault(value, set()).add(needed_layout)
    sharing: set[Op] = set()
    sharers: dict[Value, dict[Layout, set[Op]]] = {}
    for (value, layout), turned in together.items():
        results = [op.results[0] for op, _ in turned]
        later = sum(_bytes(v, propagated[v], better[v]) for v in results)
        more = sum(rules[op].flops * (share(rules[op], new) - share(rules[op], choices[op])) for op, new in turned)
        if len(turned) > 1 and _bytes(value, propagated[value], layout) + more / FLOPS_PER_BYTE < later:
            ops = {op for op, _ in turned}
            sharing |= ops
            sharers.setdefault(value, {})[layout] = ops
    moved: dict[Value, Layout] = dict(made)
    for op in graph.ops:
        for result in op.results:
            if result not in better:
                continue
            if op in through:
                whole = [(v, n) for v, n in zip(op.operands, through[op]) if v.numel >= result.numel]
                agrees = all(moved.get(v, propagated[v]) == needed_layout for v, needed_layout in whole)
            elif op in sharing:
                agrees = True
            else:
                agrees = _shorter(result, computed[result], propagated[result], better[result])
            if agrees:
                moved[result] = better[result]
    return Detours(moved, sharers)


def _other_operands(
    op: Op, rule: Rule, choice: Choice, propagated: Mapping[Value, Layout]
) -> list[tuple[Value, Layout]]:
    """The operands that a choice needs in another layout than the propagated one, with that layout."""
    needed = [layout_of(rule, dims, choice, False) for dims in rule.operands]
    return list({v: n for v, n in zip(op.operands, needed) if n != propagated[v]}.items())


def _divided(rule: Rule, choice: Choice) -> int:
    """The number of devices over which a choice divides an op's work."""
    return math.prod(size_of(choice[f].axes) for f in rule.work if f in choice)


def _bytes(value: Value, before: Layout, after: Layout) -> float:
    """The cost of resharding a value."""
    size = value.dtype.itemsize
    return cost(redistribution(value.shape, before, after, size, 0), value.shape, size, 0)


def _shorter(value: Value, computed: Layout, over: Layout, to: Layout) -> bool:
    """Whether resharding a value from `computed` to `to` sends fewer bytes directly than through the layout `over`.

    False unless `computed` is `to` with partial sums. An all-reduce sends as many bytes as a reduce-scatter and an
    all-gather, so it does not count as shorter: between these two, ops compute on shards.
    """
    if computed.whole() != to:
        return False
    return _bytes(value, computed, to) < _bytes(value, computed, over) + _bytes(value, over, to)
