"""A pass that moves gathers of parameters to their first use."""

from __future__ import annotations

from tpshard.parallelism.passes.moves import find_moves
from tpshard.parallelism.passes.order import NodeOrder
from tpshard.parallelism.program import Program


def gather_late(program: Program) -> Program:
    """Moves every gather, with its casts and copies, directly before the first computation that needs it.

    Recomputed operations move likewise. Computing operations keep their order; gradients are packed, reduced and summed
    after all of them.
    """
    moves, order = find_moves(program), NodeOrder(program.graph)
    for node in order.old:
        if moves.computes(node):
            order.add(node)
    order.apply()
    return program.with_new_order()
