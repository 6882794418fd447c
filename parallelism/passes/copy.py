"""Copying a program's graph, so that a pass changes its own."""

from __future__ import annotations

from torch import fx
from tpshard.parallelism.program import Program


def copied(program: Program) -> tuple[Program, dict[fx.Node, fx.Node]]:
    """The same program on a graph of its own, and where each node went."""
    made: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    for node in program.graph.nodes:
        made[node] = graph.node_copy(node, lambda n: made[n])
    return program.replace_graph(graph), made


__all__ = ["copied"]
