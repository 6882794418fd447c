"""Compiling the operations of every layer by torch's compiler, and leaving all others as they are (`compile: blocks`),
or compiling all operations in pieces, where control flow stands between them.

Collectives and their waits keep their order and stay asynchronous: they are never compiled. Equal layers are compiled
once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from tpshard.parallelism.graph import Layer
from tpshard.parallelism.program import INFO
from tpshard.parallelism.rules.table import entry_of
from tpshard.parallelism.runtime.compiled import Boxed, compile_graph

Key = tuple[Layer | None, bool]
"""A layer, if any, and whether it is the forward pass: a region belongs to one key."""


def with_blocks(module: fx.GraphModule, rest: bool = False) -> fx.GraphModule:
    """Replaces the operations of each layer by regions, which are compiled at their first run.

    module: one rank's graph for the interpreter (`execute.localize`). rest: whether operations that belong to no layer
    are compiled too.
    """
    return _Cut(module, rest).run()


class CompiledRegion:
    """A function of several operations of a layer, compiled at its first call; it empties the list of its inputs.

    shared: the compiled code of all regions by source code and inputs, so that regions of equal layers share it.
    """

    __name__ = "compiled_region"

    def __init__(self, body: fx.GraphModule, shared: dict[Any, Boxed]):
        self.body, self.shared = body, shared
        self.compiled: Boxed | None = None

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        if self.compiled is None:
            alike = (self.body.code, *((t.shape, t.stride(), t.dtype, t.device) for t in tensors))
            if alike not in self.shared:
                self.shared[alike] = compile_graph(self.body, tensors)
            self.compiled = self.shared[alike]
        return self.compiled(tensors)


def box(*tensors: Tensor) -> list[Tensor]:
    """A list that holds the only references to its tensors, so that emptying it frees them."""
    return list(tensors)


@dataclass
class _Open:
    """A region that is still collecting operations."""

    key: Key
    nodes: list[fx.Node] = field(default_factory=list)
    after: list[fx.Node] = field(default_factory=list)
    """Other operations that read it, and must follow it."""


class _Cut:
    """Copies a graph node by node, with operations of a layer collected into compiled regions."""

    def __init__(self, module: fx.GraphModule, rest: bool):
        self.module, self.rest, self.graph = module, rest, fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.shared: dict[Any, Boxed] = {}
        self.open: _Open | None = None
        self.inside: set[fx.Node] = set()
        """Nodes of the open region."""
        self.parts: set[fx.Node] = set()
        """Nodes that select one of several results, and move with their operation."""
        self.held: set[fx.Node] = set()
        """Nodes that wait for the region's end."""

    def run(self) -> fx.GraphModule:
        for node in self.module.graph.nodes:
            if node in self.parts:
                continue
            key = self._key(node)
            if key is None:
                self._place_uncompiled(node)
                continue
            if self.open is not None and (key != self.open.key or self._reads(node, self.held)):
                self._close()
            if self.open is None:
                self.open = _Open(key)
            parts = [user for user in node.users if user.target is operator.getitem]  # which read nothing else
            self.parts.update(parts)
            self.open.nodes += [node, *parts]
            self.inside.update((node, *parts))
        self.graph.lint()
        return fx.GraphModule(self.module, self.graph)

    def _key(self, node: fx.Node) -> Key | None:
        """The region key of an operation; None if it is not compiled."""
        metadata = node.meta.get(INFO)
        if node.op != "call_function" or metadata is None or metadata.comm is not None:
            return None
        if metadata.place.layer is None and not self.rest:
            return None
        if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
            return None
        if len(metadata.specs) > 1 and any(user.target is not operator.getitem for user in node.users):
            return None
        return metadata.place.layer, metadata.phase == "forward"

    def _reads(self, node: fx.Node, nodes: set[fx.Node]) -> bool:
        return any(source in nodes for source in node.all_input_nodes)

    def _place_uncompiled(self, node: fx.Node) -> None:
        """Places an operation that is not compiled: before the open region, if it does not depend on it.

        A collective or a wait that depends on the region ends it, so that it runs when the schedule says. Other
        operations that depend on it follow it.
        """
        if self.open is not None:
            needs = self._reads(node, self.inside) or self._reads(node, self.held)
            issues = node.meta[INFO].comm is not None if INFO in node.meta else False
            torch_op = isinstance(node.target, torch._ops.OpOverload)
            if needs and torch_op and not issues:
                self.open.after.append(node)
                self.held.add(node)
                return
            if needs or node.op == "output" or (node.op == "call_function" and not (torch_op or issues)):
                self._close()
        self._copy(node)

    def _copy(self, node: fx.Node) -> None:
        self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)

    def _close(self) -> None:
        """Places the open region at the current position, followed by the nodes that wait for it."""
        if self.open is None:
            return
        region, inside = self.open, self.inside
        self.open, self.inside, self.held = None, set(), set()
        if all(entry_of(node.target).view is not None for node in region.nodes):
            for node in region.nodes:
                self._copy(node)
        else:
            self._place(region.nodes, inside)
        for node in region.after:
            self._copy(node)

    def _place(self, nodes: Sequence[fx.Node], inside: set[fx.Node]) -> None:
        reads = list(dict.fromkeys(s for node in nodes for s in node.all_input_nodes if s not in inside))
        gives = [node for node in nodes if any(user not in inside for user in node.users)]
        body, local = fx.Graph(), {}
        for i, source in enumerate(reads):
            local[source] = body.placeholder(f"read_{i}")
        for node in nodes:  # new nodes are named after their ops, so that alike layers have the same code
            args, kwargs = fx.map_arg((node.args, node.kwargs), local.__getitem__)
            local[node] = body.create_node(node.op, node.target, args, kwargs)
        body.output([local[node] for node in gives])
        call = CompiledRegion(fx.GraphModule({}, body), self.shared)
        held = self.graph.call_function(box, tuple(self.copies[source] for source in reads))
        results = self.graph.call_function(call, (held,))
        for i, node in enumerate(gives):
            self.copies[node] = self.graph.call_function(operator.getitem, (results, i))
            self.copies[node].meta = dict(node.meta)
