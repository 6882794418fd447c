"""Copying a program's graph, so that a pass edits its own copy."""

from __future__ import annotations

from torch import fx
from tpshard.parallelism.program import Program


def copied(program: Program) -> tuple[Program, dict[fx.Node, fx.Node]]:
    """(the program on a new graph, the copy of each node)."""
    made: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    for node in program.graph.nodes:
        made[node] = graph.node_copy(node, lambda n: made[n])
    return program.replace_graph(graph), made


__all__ = ["copied"]
