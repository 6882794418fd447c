"""Classifying a step's nodes: gathers of parameters, reductions of gradients, casts and copies for them, the rest."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx
from tpshard.parallelism.program import Program, info

wait = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class Moves:
    """Sets of a step's nodes that gather parameters or reduce gradients; nodes in none of the sets compute."""

    gathers: frozenset[fx.Node]
    """All-gathers of parameters."""
    casts: frozenset[fx.Node]
    """Nodes that serve only gathers: casts and copies before them."""
    gathered: frozenset[fx.Node]
    """Waits for gathers, and views and copies of gathered values alone."""
    reductions: frozenset[fx.Node]
    """Reduce-scatters of gradients, and all-reduces among replicas."""
    packing: frozenset[fx.Node]
    """Copies into a bucket, read only by reductions and their packing."""
    reduced: frozenset[fx.Node]
    """Nodes after a reduction: its wait, and the sum into the stored gradient. No computation waits for them."""

    def computes(self, node: fx.Node) -> bool:
        sets = (self.gathers, self.casts, self.gathered, self.reductions, self.packing, self.reduced)
        return node.op == "call_function" and not any(node in one for one in sets)


def find_moves(program: Program) -> Moves:
    """Classifies the nodes of a step."""
    return program.cached("moves", lambda: _moves_of(program), in_any_order=True)


def _moves_of(program: Program) -> Moves:
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    issues = list(program.issues())
    gathers = {node for node, comm in issues if comm.of == "parameter" and comm.kind == "all_gather"}
    reductions = {node for node, comm in issues if comm.of == "gradient"}
    gathered: set[fx.Node] = set()
    reduced: set[fx.Node] = set()
    for node in nodes:
        read = node.all_input_nodes
        waits = node.target is wait and read[0] in gathers
        if waits or (read and info(node).flops == 0 and all(operand in gathered for operand in read)):
            gathered.add(node)
        if any(operand in reductions or operand in reduced for operand in read):
            reduced.add(node)
    reduced -= reductions
    casts = _only_for(nodes, gathers)
    packing = _only_for([n for n in nodes if info(n).flops == 0 and n not in reduced], reductions)
    return Moves(
        frozenset(gathers), frozenset(casts), frozenset(gathered), frozenset(reductions),
        frozenset(packing - reductions), frozenset(reduced),
    )  # fmt: skip


def _only_for(nodes: list[fx.Node], ends: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes whose results only `ends`, or other such nodes, read."""
    serving: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.users and all(user in ends or user in serving for user in node.users):
            serving.add(node)
    return serving
