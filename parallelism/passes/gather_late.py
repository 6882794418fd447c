"""Parameters are gathered where they are used."""

from __future__ import annotations

from tpshard.parallelism.passes.moves import moves
from tpshard.parallelism.passes.order import NodeOrder
from tpshard.parallelism.program import Program


def gather_late(program: Program) -> Program:
    """Every gather, with the casts before it and the copies behind it, comes just before what first computes with it.

    So does what is made again for the backward pass. What computes stays in its order; gradients are packed, reduced
    and summed behind it all.
    """
    found, order = moves(program), NodeOrder(program.graph)
    for node in order.old:
        if found.computes(node):
            order.add(node)
    order.apply()
    return program
