"""A pass that merges a matrix product and the addition of its result to a sum into one operation (`addmm`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from tpshard.parallelism.passes.copy import call
from tpshard.parallelism.program import INFO, Program, info

aten = torch.ops.aten

ADDING: dict[Any, Any] = {aten.mm.default: aten.addmm.default, aten.bmm.default: aten.baddbmm.default}
"""Maps each matrix product to the op that also adds the product to another tensor."""


def accumulate(program: Program) -> Program:
    """Computes `sum + x @ y` as one product where the result overwrites the sum, as a weight's gradient does.

    The gradient of one micro-batch is then not written to memory before it is added.
    """
    graph = program.graph
    feeds = [node for node in graph.nodes if node.op == "placeholder"]
    (ends,) = (node.args[0] for node in graph.nodes if node.op == "output")
    assert isinstance(ends, tuple | list), "the results of a program are a list"
    for output, source in program.donated.items():
        added, total = ends[output], feeds[source]
        if not isinstance(added, fx.Node):
            continue
        product = _product(added, total)
        if product is None:
            continue
        with graph.inserting_before(product):
            fused = call(graph, ADDING[product.target], (total, *product.args))
        one, other = info(product), info(added)
        fused.meta[INFO] = replace(
            one, flops=one.flops + other.flops, global_flops=one.global_flops + other.global_flops
        )
        added.replace_all_uses_with(fused)
        graph.erase_node(added)
        graph.erase_node(product)
    return program


def _product(added: fx.Node, total: fx.Node) -> fx.Node | None:
    """Returns the product that `added` adds to `total`; None if it has other readers or another spec."""
    if added.target is not aten.add.Tensor or added.kwargs or list(total.users) != [added]:
        return None
    product = next((n for n in added.all_input_nodes if n is not total), None)
    if product is None or product.target not in ADDING or list(product.users) != [added]:
        return None
    return product if info(product).specs == info(total).specs else None
