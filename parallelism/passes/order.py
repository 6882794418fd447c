"""Reordering the nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx


def reorder(graph: fx.Graph, order: Iterable[fx.Node]) -> None:
    """Reorders the nodes of a pass's own graph; `order` holds every node except the output once."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    for node in order:
        output.prepend(node)


class NodeOrder:
    """A new order of a graph's nodes that is built node by node; operands always come before their readers."""

    def __init__(self, graph: fx.Graph, ahead: Callable[[fx.Node], Iterable[fx.Node]] | None = None):
        """ahead: further nodes that must come before a node, besides its operands."""
        self.graph, self.ahead = graph, ahead
        self.old = [node for node in graph.nodes if node.op != "output"]
        self.new: list[fx.Node] = []
        self.done: set[fx.Node] = set()
        for node in self.old:
            if node.op != "call_function":
                self._add(node)

    def add(self, node: fx.Node) -> None:
        """Appends a node, and before it the operands that are not in the order yet."""
        done = self.done
        if node in done:
            return
        if self.ahead is None and done.issuperset(node._input_nodes):  # as almost always
            done.add(node)
            self.new.append(node)
            return
        stack = [node]
        while stack:
            current = stack[-1]
            if current in done:
                stack.pop()
                continue
            operands = current._input_nodes
            if not done.issuperset(operands):
                stack.extend([operand for operand in reversed(operands) if operand not in done])
                continue
            stack.pop()
            for other in self.ahead(current) if self.ahead is not None else ():
                self.add(other)
            self._add(current)

    def can(self, node: fx.Node) -> bool:
        """Whether all operands of a node are in the order already."""
        return self.done.issuperset(node._input_nodes)

    def apply(self) -> None:
        """Gives the graph this order; nodes that were not added follow in their old order."""
        for node in self.old:
            if node not in self.done:
                self.add(node)
        if self.new != self.old:
            reorder(self.graph, self.new)

    def _add(self, node: fx.Node) -> None:
        if node not in self.done:
            self.done.add(node)
            self.new.append(node)
