"""A pass that waits for what neighbours send where it is read first, so that it travels while others compute."""

from __future__ import annotations

from torch import fx
from tpshard.parallelism.passes.moves import wait
from tpshard.parallelism.passes.order import NodeOrder
from tpshard.parallelism.program import Program, info
from tpshard.parallelism.rules.table import entry_of


def wait_late(program: Program) -> Program:
    """Moves each wait for a permute, and the views of what it brings, before the first operation that reads it.

    In a ring of attention a device sends its keys on, computes with them, and only then waits for the next ones (Liu et
    al. 2023, section 3). The issues stay where they are, and the order depends only on the program, so that it is the
    same on every rank.
    """
    order = NodeOrder(program.graph)
    withheld: set[fx.Node] = set()
    for node in order.old:
        late = not withheld.isdisjoint(node.all_input_nodes) and entry_of(node.target).view is not None
        if _brings_a_shard(node) or late:
            withheld.add(node)
        else:
            order.add(node)
    order.apply()
    return program.with_new_order()


def _brings_a_shard(node: fx.Node) -> bool:
    """Whether a node waits for a permute."""
    if node.target is not wait:
        return False
    comm = info(node.all_input_nodes[0]).comm
    return comm is not None and comm.kind == "permute"
