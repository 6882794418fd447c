"""Quantized linears in a step: one rank's part of each as its program wants it, and the graph that multiplies by them.

Which rows and columns lie where is the program's `Arrangement` (see programs/layouts.py): here weights are cut to it,
and products are given the quantized form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor, fx
from tpshard.kernels import quantized_ops
from tpshard.kernels.packed import Packed
from tpshard.kernels.quantized import Quantized
from tpshard.kernels.quantized_ops import Prepared
from tpshard.kernels.reorder import REORDER
from tpshard.programs.layouts import Arrangement, Groups

_VIEW = torch.ops.aten.view.default
Block = tuple[tuple[int, int], tuple[int, int]]
"""(start, size) of a rank's outputs and inputs in a whole weight [outputs, inputs]."""
ReadQuantized = Callable[[str], Quantized | None]
"""A parameter's quantized form, whole; None for one that is dense."""
ReadBlock = Callable[[str, Sequence[int], Sequence[int]], Tensor]
"""(name, starts, sizes) -> that block of a dense parameter."""


@dataclass(frozen=True)
class Linears:
    """A rank's quantized weights by parameter name, as the program's arrangement has them."""

    of: dict[str, Prepared]
    arrangement: Arrangement
    group: Groups
    joined: dict[tuple[str, str], Packed] = field(default_factory=dict)
    """Two that are held side by side (see serve/gates.py)."""

    def parameter(self, name: str, starts: Sequence[int], sizes: Sequence[int], read: ReadBlock) -> Tensor:
        """A block of a parameter that is not quantized, its outputs in the order that the program wants."""
        columns = self.arrangement.columns_of(name, self.group)
        if columns is None:
            return read(name, starts, sizes)
        whole = read(name, (0, *starts[1:]), (len(columns), *sizes[1:]))
        return whole[columns[starts[0] : starts[0] + sizes[0]]]

    def order(self, name: str, start: int = 0, size: int | None = None) -> Tensor:
        """What a further input of the program takes: the order of that name, or the part of it that a rank holds."""
        whole = self.arrangement.order(self.arrangement.inputs[name], self.group)
        return whole[start : None if size is None else start + size]


def cached(read: ReadQuantized) -> ReadQuantized:
    """`read` that keeps the last one: its group and its codes are asked for one after the other."""
    return lru_cache(maxsize=1)(read)


def prepare(
    parts: Mapping[str, Block], read: ReadQuantized, group: Groups, arrangement: Arrangement,
    device: torch.device | str,
) -> Linears:  # fmt: skip
    """A rank's parts of the weights in `parts`, by parameter name; those that `read` has no quantized form of are
    left out."""
    found: dict[str, Prepared] = {}
    for name, ((first_out, outputs), (first_in, inputs)) in parts.items():
        whole = read(name)
        if whole is None:
            continue
        columns = _cut(arrangement.columns_of(name, group), first_out, outputs)
        rows = _cut(arrangement.rows_of(name, group), first_in, inputs)
        own = whole.take_columns(columns).take_rows(rows)
        assert own.sorted, f"{name} does not lie as its program has it"
        found[name] = quantized_ops.prepare(replace(own, bias=None), device)
    return Linears(found, arrangement, group)


def _cut(order: Tensor | None, start: int, size: int) -> Tensor:
    return torch.arange(start, start + size) if order is None else order[start : start + size]


class Inputs:
    """Adds inputs to a graph, after all others, and holds the tensors that they take."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.tensors = graph, list[Tensor]()
        self._nodes: dict[int, fx.Node] = {}
        self._last = [node for node in graph.nodes if node.op == "placeholder"][-1]

    def add(self, tensor: Tensor | None) -> fx.Node | None:
        """The node of a tensor, one for each."""
        if tensor is None:
            return None
        if id(tensor) not in self._nodes:
            with self.graph.inserting_after(self._last):
                self._last = self.graph.placeholder(f"quantized_{len(self.tensors)}")
            self._nodes[id(tensor)] = self._last
            self.tensors.append(tensor)
        return self._nodes[id(tensor)]


def reorder_inputs(
    nodes: list[fx.Node], names: Mapping[fx.Node, str], linears: Linears, inputs: Inputs, device: torch.device
) -> None:
    """Lets products (nodes of `rows_linear`) of a graph that was traced for one device, and not partitioned, take their
    inputs in the orders of the arrangement."""
    orders: dict[str, Tensor] = {}
    made: dict[tuple[fx.Node, str], fx.Node] = {}
    for node in nodes:
        x, source, bias = node.args
        key = linears.arrangement.of.get(names.get(source, ""))  # type: ignore[arg-type]
        if key is None or not isinstance(x, fx.Node):
            continue
        if key not in orders:
            orders[key] = linears.order(key).to(device)
        whole = _whole(x)
        if (whole, key) not in made:
            blocks = linears.arrangement.inputs[key].blocks
            order = inputs.add(orders[key])
            with inputs.graph.inserting_before(node):
                taken = inputs.graph.call_function(REORDER, (whole, order, blocks))
                made[whole, key] = taken if whole is x else inputs.graph.call_function(_VIEW, (taken, *x.args[1:]))
        node.args = (made[whole, key], source, bias)
    inputs.graph.eliminate_dead_code()


def _whole(x: fx.Node) -> fx.Node:
    """What all products of one input read, each through a view of its own as rows."""
    if x.target is not _VIEW:
        return x
    seen = x.args[0]
    assert isinstance(seen, fx.Node)
    return seen if seen.meta["val"].shape[-1] == x.meta["val"].shape[-1] else x


def rewrite(
    nodes: list[fx.Node], names: Mapping[fx.Node, str], linears: Mapping[str, Prepared], inputs: Inputs,
    invariant: bool, used: Tensor | None = None,
) -> None:  # fmt: skip
    """Lets products (nodes of `rows_linear`) whose weight input is quantized use the quantized form.

    `names` says which parameter an input node is. With `invariant` a row's bits do not depend on the others. `used`
    says at each step how many of its first rows are not padding.
    """
    graph = inputs.graph
    for node in nodes:
        x, source, bias = node.args
        linear = linears.get(names.get(source, ""))  # type: ignore[arg-type]
        if linear is None:
            continue
        *tensors, form = quantized_ops.arguments(linear)
        with graph.inserting_before(node):
            weight = [inputs.add(t) for t in tensors]
            y = graph.call_function(
                torch.ops.tpshard.quantized_matmul.default, (x, *weight, form, invariant, inputs.add(used))
            )
            if bias is not None:
                y = graph.call_function(torch.add, (y, bias))
        node.replace_all_uses_with(y)
        graph.erase_node(node)
