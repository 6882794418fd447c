"""The order of a graph's nodes, made anew node by node."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx


def reorder(graph: fx.Graph, order: Iterable[fx.Node]) -> None:
    """Brings the nodes of a pass's own graph into `order`, which holds every node but the output once."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    for node in order:
        output.prepend(node)


class NodeOrder:
    """A new order of a graph's nodes: each comes after what it reads."""

    def __init__(self, graph: fx.Graph, ahead: Callable[[fx.Node], Iterable[fx.Node]] | None = None):
        """`ahead`: what comes before a node although the node does not read it."""
        self.graph, self.ahead = graph, ahead
        self.old = [node for node in graph.nodes if node.op != "output"]
        self.new: list[fx.Node] = []
        self.done: set[fx.Node] = set()
        for node in self.old:
            if node.op != "call_function":
                self._add(node)

    def add(self, node: fx.Node) -> None:
        """Adds a node, behind everything that it needs and that is not there yet."""
        stack = [node]
        while stack:
            here = stack[-1]
            if here in self.done:
                stack.pop()
                continue
            missing = [operand for operand in here.all_input_nodes if operand not in self.done]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            for other in self.ahead(here) if self.ahead is not None else ():
                self.add(other)
            self._add(here)

    def can(self, node: fx.Node) -> bool:
        """Whether everything is there that a node reads."""
        return self.done.issuperset(node.all_input_nodes)

    def apply(self) -> None:
        """Gives the graph this order; what was not added follows, as it was."""
        for node in self.old:
            self.add(node)
        reorder(self.graph, self.new)

    def _add(self, node: fx.Node) -> None:
        if node not in self.done:
            self.done.add(node)
            self.new.append(node)


__all__ = ["NodeOrder", "reorder"]
