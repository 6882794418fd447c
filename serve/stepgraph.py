"""A step as the graph that a device runs: traced for one, or one device's program, with products of fixed shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree
from tpshard.kernels import rows_linear
from tpshard.programs.serving import Pools, step_function

aten = torch.ops.aten


def trace(model: nn.Module, pools: Pools, parameters: dict[str, Tensor]) -> fx.Graph:
    """The step of `model` as a graph of ATen ops, for any number of rows, wanted rows, sequences and blocks.

    Its inputs are the flattened arguments of `step`; the names of tensors are dropped.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    device = pools[0][0].device

    def free(*sizes: int) -> Tensor:  # sizes of 1 stay; equal sizes are one symbol
        real = torch.zeros(sizes, dtype=torch.int64, device=device)
        dims = [DimDynamic.STATIC if size == 1 else DimDynamic.DUCK for size in sizes]
        return mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims))

    fixed = pytree.tree_map(lambda x: mode.from_tensor(x, static_shapes=True), (pools, parameters))
    row = [free(1, 24) for _ in range(4)]
    with torch.no_grad():
        graph = make_fx(step_function(model), tracing_mode="symbolic")(*row, free(3, 5), free(16), *fixed).graph
    for node in list(graph.nodes):
        if str(node.target) in ("tpshard.named.default", "aten.detach.default"):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    (result,) = [node for node in graph.nodes if node.op == "output"]
    result.args = tuple(pytree.tree_leaves(result.args[0]))
    graph.set_codegen(fx.graph.CodeGen())
    graph.eliminate_dead_code()
    return graph


def fix_rows(graph: fx.Graph, only: Collection[fx.Node] | None = None) -> list[fx.Node]:
    """Replaces each product of rows and a turned weight (an input, of those in `only`) by `rows_linear`; returns the
    new nodes.

    The order of a row's sums is then the same in every batch (see kernels.rows_linear).
    """
    found = []
    for node in list(graph.nodes):
        if node.target not in (aten.mm.default, aten.addmm.default):
            continue
        *bias, x, turned = node.args
        if not _turns(turned) or (only is not None and turned.args[0] not in only):
            continue
        if bias and (node.kwargs or bias[0].op != "placeholder"):
            continue
        with graph.inserting_before(node):
            new = graph.call_function(
                torch.ops.tpshard.rows_linear.default, (x, turned.args[0], bias[0] if bias else None)
            )
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        found.append(new)
    graph.eliminate_dead_code()
    return found


def _turns(node: Any) -> bool:
    """Whether the node is a matrix turned on its side."""
    if not isinstance(node, fx.Node):
        return False
    return node.target is aten.t.default or (node.target is aten.permute.default and node.args[1] in ([1, 0], (1, 0)))


def pack_weights(
    graph: fx.Graph, nodes: list[fx.Node], weight_of: Callable[[fx.Node], Tensor | None], made: dict[int, Tensor]
) -> list[Tensor]:
    """Lets `rows_linear` nodes read weights in the library's packed form, as new inputs at the end of the graph's.

    Returns the packed weights in the order of these inputs. `made` holds those that other graphs of the same weights
    (by id) have packed.
    """
    inputs: dict[fx.Node, fx.Node] = {}
    packed: list[Tensor] = []
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in nodes:
        x, source, bias = node.args
        assert isinstance(source, fx.Node)
        weight = weight_of(source)
        if weight is None or not rows_linear.can_pack(weight):
            continue
        if source not in inputs:
            if id(weight) not in made:
                made[id(weight)] = rows_linear.pack(weight)
            packed.append(made[id(weight)])
            with graph.inserting_after(last):
                inputs[source] = last = graph.placeholder(f"{source.name}_packed")
        node.target = torch.ops.tpshard.packed_rows_linear.default
        node.args = (x, inputs[source], bias, weight.shape[0])
    return packed


def let_go(graph: fx.Graph, inputs: list[fx.Node], held: list[Tensor]) -> list[Tensor]:
    """`held` without the memory of those tensors whose input no node reads any more (packed ones replaced them)."""
    return [x if node.users else x.new_zeros(1).expand(x.shape) for node, x in zip(inputs, held)]
