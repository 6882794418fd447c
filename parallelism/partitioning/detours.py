"""Finding values whose propagated layout only causes two reshards: to it after the producer, from it by all readers.

Propagation settles each value before it knows all its neighbours: a weight may shard a result's columns before the
batch of the activation beside it is known. If the op that computes the value and every op that reads it then agree on
another layout, the propagated one only costs two reshards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tpshard.parallelism.anchors import is_anchor
from tpshard.parallelism.graph import Graph, Op, Value
from tpshard.parallelism.partitioning.choose import Choice, choice_for, layout_of
from tpshard.parallelism.resharding.reshard import cost, redistribution
from tpshard.parallelism.rules.rule import Rule
from tpshard.parallelism.sharding import Layout


def detours(
    graph: Graph,
    rules: Mapping[Op, Rule],
    choices: Mapping[Op, Choice],
    propagated: Mapping[Value, Layout],
    computed: Mapping[Value, Layout],
    fixed: Collection[Value],
) -> dict[Value, Layout]:
    """New layouts for the values whose propagated layout only causes two reshards.

    choices: the cuts in which each op computes under the propagated layouts. computed: the layout of each result under
    them. fixed: annotated values, which keep their layout.
    """
    needs: dict[Value, set[Layout]] = {}
    better: dict[Value, Layout] = {}
    through: dict[Op, list[Layout]] = {}
    """The operands' layouts of pass-through ops that compute their result in its better layout."""
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
            if rule.priority == 0 and len(op.results) == 1:
                choice = choice_for(op, rule, 0, layout)
                if choice is None:
                    continue
                needed = through[op] = [layout_of(rule, dims, choice, False) for dims in rule.operands]
            better[result] = layout
        for value, needed_layout in zip(op.operands, needed):
            needs.setdefault(value, set()).add(needed_layout)
    moved: dict[Value, Layout] = {}
    for op in graph.ops:
        for result in op.results:
            if result not in better:
                continue
            if op in through:
                whole = [(v, n) for v, n in zip(op.operands, through[op]) if v.numel >= result.numel]
                agrees = all(moved.get(v, propagated[v]) == needed_layout for v, needed_layout in whole)
            else:
                agrees = _shorter(result, computed[result], propagated[result], better[result])
            if agrees:
                moved[result] = better[result]
    return moved


def _shorter(value: Value, computed: Layout, over: Layout, to: Layout) -> bool:
    """Whether resharding a value from `computed` to `to` sends fewer bytes directly than through the layout `over`.

    False unless `computed` is `to` with partial sums. An all-reduce sends as many bytes as a reduce-scatter and an
    all-gather, so it does not count as shorter: between these two, ops compute on shards.
    """
    if computed.whole() != to:
        return False
    size = value.dtype.itemsize
    first, second, direct = (
        cost(redistribution(value.shape, *ends, size, 0), value.shape, size, 0)
        for ends in ((computed, over), (over, to), (computed, to))
    )
    return direct < first + second
