"""A pass that removes views of views and repeated operations, and scales values before it expands them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from tpshard.parallelism.node_info import INFO, info, shape_of
from tpshard.parallelism.pricing.flow import Flow
from tpshard.parallelism.program import Program
from tpshard.parallelism.resharding.new_nodes import call
from tpshard.parallelism.rules.table import entry_of

aten = torch.ops.aten

RESHAPES = (aten.reshape.default, aten.view.default)
SCALINGS = (aten.mul.Scalar, aten.div.Scalar)


def simplify(program: Program) -> Program:
    """Removes views of views, and operations that a layer's forward or backward pass repeats on the same operands.

    An expanded value that is multiplied by a number, as a mean's gradient is, is multiplied before it is expanded.
    Results with storage of their own stay apart from each other, since one may be overwritten. What the backward pass
    recomputes stays apart from the forward pass's value.
    """
    flow = Flow.of(program)
    returned = {flow.root[node] for end in flow.nodes if end.op == "output" for node in end.all_input_nodes}
    first: dict[Any, list[fx.Node]] = {}
    for node in flow.nodes:
        if not _is_pure(node):
            continue
        if node.target in RESHAPES:
            source = _read_first(node, flow)
            if shape_of(source) == shape_of(node) and source.op != "placeholder":
                _replace(node, source)
                continue
        elif node.target in SCALINGS and flow.root[node] not in returned:
            _scale_first(node)
        where = info(node).place
        alike = first.setdefault((node.target, _operand(node), where.layer, where.phase), [])
        same = next((other for other in alike if _is_same(node, other)), None)
        if same is None:
            alike.append(node)
        elif node in flow.views or flow.root[node] not in returned:
            _replace(node, same)
    return program


def _is_pure(node: fx.Node) -> bool:
    """Whether a node's result depends on its operands alone, and is computed by an op of torch."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    moves = info(node).comm is not None or node.target.namespace == "_c10d_functional"
    return not moves and not node.target._schema.is_mutable and not entry_of(node.target).random


def _operand(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0]


def _read_first(node: fx.Node, flow: Flow) -> fx.Node:
    """Makes a reshape read the source of the views before it, and returns that.

    A reshape that copies stays: its readers may rely on the copy being contiguous.
    """
    skipped = source = _operand(node)
    while source.target in RESHAPES and source in flow.views:
        source = _operand(source)
    if source is not skipped:
        node.update_arg(0, source)
    while skipped is not source and not skipped.users:
        skipped, unread = _operand(skipped), skipped
        unread.graph.erase_node(unread)
    return source


def _scale_first(node: fx.Node) -> None:
    """Turns the scaling of an expanded value that nothing else reads into an expansion of the scaled value.

    The result is then a view with strides of 0, so its readers must be operations that accept any strides.
    """
    expand, (spec,) = _operand(node), info(node).specs
    if expand.target is not aten.expand.default or len(expand.users) > 1 or not all(map(_takes_any, node.users)):
        return
    source = _operand(expand)
    with node.graph.inserting_before(node):
        scaled = call(node.graph, node.target, (source, *node.args[1:]))
    scaled.meta[INFO] = replace(info(node), specs=(replace(spec, shape=shape_of(source)),))
    node.target, node.args = expand.target, (scaled, *expand.args[1:])
    expand.graph.erase_node(expand)


def _takes_any(reader: fx.Node) -> bool:
    """Whether a reader computes a new value from operands with any strides."""
    entry = entry_of(reader.target)
    return _is_pure(reader) and not entry.dense and entry.view is None and entry.work == "stream"


def _is_same(node: fx.Node, other: fx.Node) -> bool:
    same = repr(node.args) == repr(other.args) and repr(node.kwargs) == repr(other.kwargs)
    return same and info(node).specs == info(other).specs


def _replace(node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)
