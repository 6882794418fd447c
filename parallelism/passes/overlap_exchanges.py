"""A pass that computes products of a layer while tokens travel to experts and back (GShard's dispatch and combine)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx
from tpshard.parallelism.graph import Layer
from tpshard.parallelism.passes.moves import wait
from tpshard.parallelism.passes.order import NodeOrder
from tpshard.parallelism.program import Program, info
from tpshard.parallelism.rules.table import entry_of

_PRODUCTS = ("matmul", "attention", "attention_backward")


def overlap_exchanges(program: Program) -> Program:
    """Computes products of a layer between the issue and the wait of each of its exchanges of activations.

    Exchanges are all-to-alls, and the gathers and reduce-scatters of experts that drop no token. The products neither
    feed an exchange nor need its result: those of a shared expert, and in the backward pass also gradients of weights.
    Exchanges share them in proportion to their bytes. Collectives stay as they are, and the order depends only on the
    program, so that it is the same on every rank. Memory grows by the operands and
    results of the moved products, which live longer.
    """
    between: dict[fx.Node, list[fx.Node]] = {}
    for half in _halves(program):
        between.update(half.deal_products())
    if not between:
        return program.with_new_order()
    order = NodeOrder(program.graph)
    withheld = {product for products in between.values() for product in products}
    late: list[fx.Node] = []
    for node in order.old:
        if node in withheld:
            continue
        if not order.can(node):  # it needs a product that has been withheld
            late.append(node)
            continue
        for product in between.get(node, ()):
            order.add(product)
        order.add(node)
        if node in between:
            waiting, late = late, []
            for other in waiting:
                if order.can(other):
                    order.add(other)
                else:
                    late.append(other)
    order.apply()
    return program.with_new_order()


@dataclass
class _Half:
    """The forward or the backward computation of a layer, with its nodes' positions in the graph."""

    nodes: Sequence[fx.Node]
    """All nodes of the graph."""
    members: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    """The waits of exchanges."""

    def deal_products(self) -> dict[fx.Node, list[fx.Node]]:
        """Distributes the products over the waits; returns the products to compute before each wait."""
        window = range(self.members[0], self.members[-1] + 1)
        issues = [self.nodes[i].all_input_nodes[0] for i in self.waits]
        needed = [_before(self.nodes, window, issue) for issue in issues]
        after = [_after(self.nodes, window, self.nodes[i]) for i in self.waits]
        at = {node: i for i, node in enumerate(self.nodes)}

        def fits(product: fx.Node, turn: int) -> bool:
            issued = (j for j, issue in enumerate(issues) if at[issue] < self.waits[turn])
            return not any(product in needed[j] for j in issued) and not any(product in a for a in after[turn:])

        products = [self.nodes[i] for i in self.members if entry_of(self.nodes[i].target).work in _PRODUCTS]
        free = {p: [fits(p, turn) for turn in range(len(issues))] for p in products}
        left = [p for p in products if any(free[p])]
        work = sum(info(p).flops for p in left)
        sizes = [_bytes(issue) for issue in issues]
        out: dict[fx.Node, list[fx.Node]] = {}
        for turn, i in enumerate(self.waits):
            share, flops = work * sizes[turn] / sum(sizes), 0.0
            last = turn == len(self.waits) - 1
            for product in [p for p in left if free[p][turn]]:
                if not last and any(free[product][turn + 1 :]) and flops + info(product).flops / 2 > share:
                    break  # this product and later ones go to later waits
                flops += info(product).flops
                out.setdefault(self.nodes[i], []).append(product)
                left.remove(product)
        return out


def _halves(program: Program) -> Iterable[_Half]:
    nodes = list(program.graph.nodes)
    halves: dict[tuple[Layer, bool], _Half] = {}
    for i, node in enumerate(nodes):
        if node.op != "call_function":
            continue
        place = info(node).place
        if place.layer is None:
            continue
        half = halves.setdefault((place.layer, place.phase == "forward"), _Half(nodes))
        half.members.append(i)
        if node.target is wait and _is_exchange(node.all_input_nodes[0], node):
            half.waits.append(i)
    return [half for half in halves.values() if half.waits]


def _is_exchange(issue: fx.Node, waited: fx.Node) -> bool:
    comm = info(issue).comm
    if comm is None or comm.of in ("parameter", "gradient"):
        return False
    if comm.kind == "all_gather":
        return _reaches_experts(waited, lambda node: list(node.users))
    if comm.kind == "reduce_scatter":
        return _reaches_experts(issue, lambda node: node.all_input_nodes)
    return comm.kind == "all_to_all"


def _reaches_experts(node: fx.Node, onward: Callable[[fx.Node], list[fx.Node]]) -> bool:
    """Whether a path along `onward`, through nodes that only move data, leads to a product of routed experts."""
    queue = onward(node)
    while queue:
        near = queue.pop()
        if near.op != "call_function":
            continue
        if entry_of(near.target).routed:
            return True
        if info(near).flops == 0 and info(near).comm is None:
            queue.extend(onward(near))
    return False


def _bytes(issue: fx.Node) -> int:
    comm = info(issue).comm
    assert comm is not None
    return comm.bytes


def _before(nodes: Sequence[fx.Node], window: range, end: fx.Node) -> Collection[fx.Node]:
    """The nodes of a window that `end` needs."""
    needed = {end}
    for i in reversed(window):
        if nodes[i] in needed:
            needed.update(nodes[i].all_input_nodes)
    return needed


def _after(nodes: Sequence[fx.Node], window: range, start: fx.Node) -> Collection[fx.Node]:
    """The nodes of a window that need `start`."""
    needing = {start}
    for i in window:
        if not needing.isdisjoint(nodes[i].all_input_nodes):
            needing.add(nodes[i])
    return needing
