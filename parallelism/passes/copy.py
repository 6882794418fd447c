"""Copying a program's graph, so that a pass edits its own copy."""

from __future__ import annotations

from torch import fx
from tpshard.parallelism.program import Program


def copy_program(program: Program) -> tuple[Program, dict[fx.Node, fx.Node]]:
    """Copies a program's graph; returns the program with the new graph, and the copy of each node."""
    copies: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    for node in program.graph.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    return program.replace_graph(graph), copies
