"""A pass that issues gathers ahead of their use (SimpleFSDP, section 4.2)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx
from tpshard.parallelism.passes.moves import find_moves, wait
from tpshard.parallelism.passes.order import NodeOrder
from tpshard.parallelism.program import Program


def prefetch(program: Program, units: int = 1) -> Program:
    """Issues each bucket's all-gather `units` buckets before its first use; waits stay at the first use.

    Memory grows by at most `units` gathered buckets. The order of collectives depends only on the program, and is the
    same on every rank.
    """
    gathers = find_moves(program).gathers
    waits = [node for node in program.graph.nodes if node.target is wait and node.all_input_nodes[0] in gathers]
    used = list(dict.fromkeys(node.all_input_nodes[0] for node in waits))
    turn = {gather: i for i, gather in enumerate(used)}
    waiting = set(waits)

    def ahead(node: fx.Node) -> Iterable[fx.Node]:
        if node not in waiting:
            return ()
        at = turn[node.all_input_nodes[0]]
        return used[at + 1 : at + 1 + units]

    NodeOrder(program.graph, ahead).apply()
    return program.with_new_order()
