"""Copying a program's graph, so that a pass edits its own copy."""

from __future__ import annotations

from torch import fx
from tpshard.parallelism.program import Program
from tpshard.parallelism.resharding.new_nodes import copy_node


def copy_program(program: Program) -> tuple[Program, dict[fx.Node, fx.Node]]:
    """Copies a program's graph; returns the program with the new graph, and the copy of each node."""
    copies: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    for node in program.graph.nodes:
        copies[node] = copy_node(graph, node, copies.__getitem__)
    return program.replace_graph(graph), copies
