"""Copying a program's graph, so that a pass changes its own."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx
from tpshard.parallelism.program import Program


def copied(program: Program) -> tuple[Program, dict[fx.Node, fx.Node]]:
    """The same program on a graph of its own, and where each node went."""
    made: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    for node in program.graph.nodes:
        made[node] = graph.node_copy(node, lambda n: made[n])
    return program.replace_graph(graph), made


def reorder(graph: fx.Graph, order: Iterable[fx.Node]) -> None:
    """Brings the nodes of a pass's own graph into `order`, which holds every node but the output once."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    for node in order:
        output.prepend(node)


__all__ = ["copied", "reorder"]
