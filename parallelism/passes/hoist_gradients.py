"""Gradients are finished where they are made."""

from __future__ import annotations

from torch import fx
from tpshard.parallelism.passes.moves import moves
from tpshard.parallelism.passes.order import reorder
from tpshard.parallelism.program import Program, info


def hoist_gradients(program: Program) -> Program:
    """Casts and sums that only a gradient waits for follow their operands.

    They are traced behind the whole backward pass: left there, every gradient would live until then unsharded. All
    else stays in its order.
    """
    found, nodes = moves(program), list(program.graph.nodes)
    tail: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.op == "call_function" and not info(node).saved and info(node).phase == "backward":
            ends = (u.op == "output" or u in tail or u in found.reductions or u in found.reduced for u in node.users)
            if all(ends):
                tail.add(node)
    at: dict[fx.Node, tuple[int, int]] = {}
    for i, node in enumerate(nodes):
        at[node] = (i, 0)
        if node in tail and node.all_input_nodes:
            first, second = max(at[operand] for operand in node.all_input_nodes)
            at[node] = (first, second + 1)
    reorder(program.graph, sorted((node for node in nodes if node.op != "output"), key=at.__getitem__))
    return program
