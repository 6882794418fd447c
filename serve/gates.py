"""silu(x @ gate) * (x @ up) with quantized weights as one launch, on a GPU.

A CPU gains nothing: there both products are one call each, and the gate is a kernel of its own (serve/fusion.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from tpshard.kernels import quantized_ops
from tpshard.kernels.packed import Packed, beside
from tpshard.serve.quantized import Inputs, Linears

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


class Gate(NamedTuple):
    """Nodes of a graph: two products of the same rows, and what is made of them."""

    gate: fx.Node
    up: fx.Node
    view: fx.Node | None
    """Of the gate's product, where the up's is viewed alike."""
    result: fx.Node


def join_gates(
    nodes: Collection[fx.Node], names: Mapping[fx.Node, str], linears: Linears, inputs: Inputs, invariant: bool
) -> int:
    """Replaces each gate of two products (of `nodes`, those of `rows_linear`); returns how many there were.

    Their weights are held side by side from then on, in `linears` as well: all graphs of the same weights come here.
    """
    graph, found = inputs.graph, 0
    for node in list(nodes):
        gate = None if node._erased else _gate(node, nodes)
        weight = None if gate is None else _weight(linears, *(names.get(n.args[1], "") for n in gate[:2]))  # type: ignore[arg-type]
        if gate is None or weight is None:
            continue
        *tensors, form = quantized_ops.arguments(weight)
        with graph.inserting_before(gate.result):
            given = (gate.gate.args[0], *(inputs.add(t) for t in tensors), form, invariant)
            made = graph.call_function(quantized_ops.GATE_UP, given)
            if gate.view is not None:
                made = graph.call_function(gate.view.target, (made, *gate.view.args[1:]))  # type: ignore[arg-type]
                sizes: Any = gate.view.args[1]
                for asked in (n for n in gate.view.users if n.target is aten.sym_size.int):
                    asked.replace_all_uses_with(sizes[asked.args[1]])
        made.meta.update(gate.result.meta)
        gate.result.replace_all_uses_with(made)
        graph.eliminate_dead_code()
        found += 1
    return found


def _weight(linears: Linears, gate: str, up: str) -> Packed | None:
    """Both side by side: joined before, for another graph, or now."""
    known = linears.joined.get((gate, up))
    if known is None:
        parts = [linears.of.get(name) for name in (gate, up)]
        known = beside(*parts) if all(isinstance(part, Packed) for part in parts) else None  # type: ignore[arg-type]
        if known is not None:
            linears.joined[gate, up] = known
            linears.of.update(dict.fromkeys((gate, up), known))
    return known


def _gate(gate: fx.Node, products: Collection[fx.Node]) -> Gate | None:
    """What begins with this product, if it is read by nothing else."""
    view = _only(gate, *_VIEWS)
    silu = _only(view or gate, aten.silu.default)
    result = silu and _only(silu, aten.mul.Tensor)
    if silu is None or result is None or result.args[0] is result.args[1]:
        return None
    other = result.args[1 if result.args[0] is silu else 0]
    up: Any = other
    if view is not None:
        alike = isinstance(other, fx.Node) and (other.target, other.args[1:]) == (view.target, view.args[1:])
        up = other.args[0] if alike else None  # type: ignore[union-attr]
    if up not in products or len(up.users) != 1 or len(other.users) != 1:  # type: ignore[union-attr]
        return None
    with_bias = gate.args[2] is not None or up.args[2] is not None
    return None if with_bias or _rows(gate) != _rows(up) else Gate(gate, up, view, result)


def _only(node: fx.Node, *targets: Any) -> fx.Node | None:
    """The one user of a node besides those that ask for its size, if it is one of these operations."""
    users = [user for user in node.users if user.target is not aten.sym_size.int]
    return users[0] if len(users) == 1 and users[0].target in targets else None


def _rows(product: fx.Node) -> tuple[Any, ...]:
    """What a product multiplies: products may each have a view of their own."""
    x = product.args[0]
    assert isinstance(x, fx.Node)
    return (x.args[0], x.args[1:]) if x.target in _VIEWS else (x,)
