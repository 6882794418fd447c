"""A pass that reduces gradients where they are computed (SimpleFSDP, section 4.2)."""

from __future__ import annotations

from torch import fx
from tpshard.parallelism.passes.moves import Moves, find_moves
from tpshard.parallelism.passes.order import NodeOrder
from tpshard.parallelism.program import Program


def reduce_early(program: Program) -> Program:
    """Issues each reduction as soon as all its gradients are computed; its wait stays after all computation.

    The order of collectives depends only on the program, and is the same on every rank.
    """
    moves, order = find_moves(program), NodeOrder(program.graph)
    missing: dict[fx.Node, int] = {}
    feeds: dict[fx.Node, list[fx.Node]] = {}
    for node in order.old:
        if node in moves.reductions:
            sources = _sources(node, moves)
            missing[node] = len(sources)
            for source in sources:
                feeds.setdefault(source, []).append(node)
    for node in order.old:
        if node in moves.packing or node in moves.reductions or node in moves.reduced:
            continue
        order.add(node)
        for reduction in feeds.get(node, ()):
            missing[reduction] -= 1
            if missing[reduction] == 0:
                order.add(reduction)
    order.apply()
    return program.with_new_order()


def _sources(reduction: fx.Node, moves: Moves) -> set[fx.Node]:
    """The computing nodes whose results a reduction packs."""
    sources: set[fx.Node] = set()
    queue = list(reduction.all_input_nodes)
    while queue:
        node = queue.pop()
        if node in moves.packing:
            queue.extend(node.all_input_nodes)
        elif node.op == "call_function" and node not in moves.reduced:
            sources.add(node)
    return sources
