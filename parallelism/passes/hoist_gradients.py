"""A pass that moves the casts and sums between a gradient and its reduction to where the gradient is computed."""

from __future__ import annotations

from torch import fx
from tpshard.parallelism.passes.moves import find_moves
from tpshard.parallelism.passes.order import reorder
from tpshard.parallelism.program import Program, info


def hoist_gradients(program: Program) -> Program:
    """Moves the casts and sums that lead only to a gradient's reduction directly behind their operands.

    They are traced after the whole backward pass; left there, every unsharded gradient would live until then. All other
    nodes keep their order.
    """
    moves, nodes = find_moves(program), list(program.graph.nodes)
    tail: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.op == "call_function" and not info(node).saved and info(node).phase == "backward":
            ends = (u.op == "output" or u in tail or u in moves.reductions or u in moves.reduced for u in node.users)
            if all(ends):
                tail.add(node)
    at: dict[fx.Node, tuple[int, int]] = {}
    for i, node in enumerate(nodes):
        at[node] = (i, 0)
        if node in tail and node.all_input_nodes:
            first, second = max(at[operand] for operand in node.all_input_nodes)
            at[node] = (first, second + 1)
    reorder(program.graph, sorted((node for node in nodes if node.op != "output"), key=at.__getitem__))
    return program.with_new_order()
