"""Nodes that are added directly have the names that `fx.Graph` would give them, and so have those added later."""

from __future__ import annotations

import torch
from torch import fx
from tpshard.parallelism.resharding.new_nodes import call, copy_node


def test_names_are_those_of_fx() -> None:
    of_fx, direct, named = fx.Graph(), fx.Graph(), fx.Graph()
    for name in ("add", "add_1", "add_3", "add_3_4", "x7", "sum", "sum_1", "add_", "_2", "add_10", "add_2"):
        named.create_node("call_function", torch.add, (), {}, name)
    for node in named.nodes:
        of_fx.node_copy(node)
        copy_node(direct, node, lambda operand: operand)
    for target in (torch.add, torch.sum, torch.ops.aten.view.default) * 3:
        of_fx.call_function(target)
        call(direct, target, ())
    assert [node.name for node in direct.nodes] == [node.name for node in of_fx.nodes]
    assert len(direct.nodes) == len(of_fx.nodes)
    assert len(direct.find_nodes(op="call_function", target=torch.add)) == 14
