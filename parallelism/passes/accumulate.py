"""A pass that merges a matrix product, or the joining of parts, and the addition to a sum into one operation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from tpshard.kernels.add_parts import add_parts
from tpshard.parallelism.program import INFO, Program, info
from tpshard.parallelism.resharding.new_nodes import call

aten = torch.ops.aten

ADDING: dict[Any, Any] = {aten.mm.default: aten.addmm.default, aten.bmm.default: aten.baddbmm.default}
"""Maps each matrix product to the op that also adds the product to another tensor."""


LONG = 4
"""The number of products from which on a sum of them is added up product by product."""


def accumulate(program: Program) -> Program:
    """Computes `sum + x @ y` as one product: where the result overwrites the sum, as a weight's gradient does, and
    along a sum of `LONG` products or more, as a head's gradient from the chunks of a loss is.

    The gradient of one micro-batch is then not written to memory before it is added; and the products of a long sum are
    not all held for the one kernel that a compiler makes of its additions. Parts of a gradient, such as experts' gates
    and ups in one parameter, are added each in its place, and not joined.
    """
    graph = program.graph
    feeds = [node for node in graph.nodes if node.op == "placeholder"]
    (ends,) = (node.args[0] for node in graph.nodes if node.op == "output")
    assert isinstance(ends, tuple | list), "the results of a program are a list"
    for output, source in program.donated.items():
        if isinstance(added := ends[output], fx.Node):
            _merge(graph, added, feeds[source], early=True)
            _merge_parts(graph, added, feeds[source])
    sums = [node for node in graph.nodes if node.target is aten.add.Tensor and _depth(node) >= LONG]
    inner = {total for added in sums if (total := _total(added))}
    for end in [added for added in sums if added not in inner]:
        chain = [end]
        while (total := _total(chain[-1])) is not None and total.target is aten.add.Tensor:
            chain.append(total)
        for added in reversed(chain):
            if (total := _total(added)) is not None:
                _merge(graph, added, total)
    return program


def _merge(graph: fx.Graph, added: fx.Node, total: fx.Node, early: bool = False) -> None:
    """Replaces a product and its addition to `total` by one operation, if they are such. early: in the place of the
    product, before which `total` is there, as an input is; else in that of the addition."""
    product = _product(added, total)
    if product is None:
        return
    with graph.inserting_before(product if early else added):
        fused = call(graph, ADDING[product.target], (total, *product.args))
        one, other = info(product), info(added)
        fused.meta[INFO] = replace(
            one, flops=one.flops + other.flops, global_flops=one.global_flops + other.global_flops
        )
    added.replace_all_uses_with(fused)
    graph.erase_node(added)
    graph.erase_node(product)


def _merge_parts(graph: fx.Graph, added: fx.Node, total: fx.Node) -> None:
    """Replaces a concatenation, its cast if any, and its addition to `total` by one operation, if they are such."""
    if added.target is not aten.add.Tensor or added.kwargs or list(total.users) != [added]:
        return
    gone = [added]
    while len(gone) < 4:
        value = next((n for n in gone[-1].all_input_nodes if n is not total), None)
        if value is None or list(value.users) != [gone[-1]]:
            return
        gone.append(value)
        if value.target is aten.cat.default:
            break
        if value.target is not aten._to_copy.default:
            return
    if gone[-1].target is not aten.cat.default or info(gone[1]).specs != info(total).specs:
        return
    parts, dim = gone[-1].args[0], gone[-1].args[1] if len(gone[-1].args) > 1 else 0
    with graph.inserting_before(added):
        fused = call(graph, add_parts, (total, parts, dim))
        fused.meta[INFO] = info(added)
    added.replace_all_uses_with(fused)
    for node in gone:
        graph.erase_node(node)


def _total(added: fx.Node) -> fx.Node | None:
    """The sum of products, or the first product, to which a sum adds one more; None where it does not."""
    for total in added.all_input_nodes[:2]:
        before = total.target in (*ADDING, *ADDING.values(), aten.add.Tensor)
        if before and _product(added, total) is not None:
            return total
    return None


def _depth(added: fx.Node) -> int:
    """The number of products in a sum."""
    count, total = 1, _total(added)
    while total is not None:
        count += 1
        total = _total(total) if total.target is aten.add.Tensor else None
    return count


def _product(added: fx.Node, total: fx.Node) -> fx.Node | None:
    """Returns the product that `added` adds to `total`; None if it has other readers or another spec."""
    if added.target is not aten.add.Tensor or added.kwargs or list(total.users) != [added]:
        return None
    product = next((n for n in added.all_input_nodes if n is not total), None)
    if product is None or product.target not in ADDING or list(product.users) != [added]:
        return None
    return product if info(product).specs == info(total).specs else None
