"""A pass that computes products while activations travel: tokens to experts and back, shards between tensor ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import fx
from tpshard.parallelism.graph import Layer
from tpshard.parallelism.passes.moves import wait
from tpshard.parallelism.passes.order import NodeOrder
from tpshard.parallelism.program import Program, info
from tpshard.parallelism.rules.table import entry_of

_PRODUCTS = ("matmul", "attention", "attention_backward")


def overlap_exchanges(program: Program) -> Program:
    """Computes products of a layer between the issue and the wait of each of its exchanges of activations.

    Exchanges are the collectives of activations and of their gradients, except permutes. The products neither feed an
    exchange nor need its result: those of a shared expert, and in the backward pass gradients of weights (GShard's
    dispatch and combine; Megatron-LM's gradients of column-parallel layers). The first exchange of a layer's backward
    pass, for which that layer has no product, takes from the layer before it.
    Exchanges share them in proportion to their bytes. Collectives stay as they are, and the order depends only on the
    program, so that it is the same on every rank. Memory grows by the operands and results of the moved products, which
    live longer.
    """
    between: dict[fx.Node, list[fx.Node]] = {}
    for half in _halves(program):
        for end, products in half.deal_products().items():
            between.setdefault(end, []).extend(products)
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
    at: Mapping[fx.Node, int]
    """The position of each of them."""
    members: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    """The waits of exchanges."""

    def lend_first(self, earlier: _Half) -> None:
        """Gives the first exchange to an earlier half if nothing is computed here that does not need its result."""
        window = range(self.members[0], self.members[-1] + 1)
        after = _after(self.nodes, window, self.nodes[self.waits[0]])
        needed = _before(self.nodes, window, self.nodes[self.waits[0]])
        if all(product in after or product in needed for product in self.products()):
            earlier.waits.append(self.waits.pop(0))

    def products(self) -> list[fx.Node]:
        return [self.nodes[i] for i in self.members if entry_of(self.nodes[i].target).work in _PRODUCTS]

    def deal_products(self) -> dict[fx.Node, list[fx.Node]]:
        """Distributes the products over the waits; returns the products to compute before each wait."""
        window = range(self.members[0], max(self.members[-1], self.waits[-1]) + 1)
        issues = [self.nodes[i].all_input_nodes[0] for i in self.waits]
        needed = [_before(self.nodes, window, issue) for issue in issues]
        after = [_after(self.nodes, window, self.nodes[i]) for i in self.waits]

        def fits(product: fx.Node, turn: int) -> bool:
            issued = (j for j, issue in enumerate(issues) if self.at[issue] < self.waits[turn])
            return not any(product in needed[j] for j in issued) and not any(product in a for a in after[turn:])

        free = {p: [fits(p, turn) for turn in range(len(issues))] for p in self.products()}
        left = [p for p in free if any(free[p])]
        sizes = [_bytes(issue) if any(free[p][turn] for p in left) else 0 for turn, issue in enumerate(issues)]
        out: dict[fx.Node, list[fx.Node]] = {}
        for turn, i in enumerate(self.waits):
            if not sizes[turn]:
                continue
            work = sum(info(p).flops for p in left if any(free[p][turn:]))
            share, flops = work * sizes[turn] / sum(sizes[turn:]), 0.0
            for product in [p for p in left if free[p][turn]]:
                if any(free[product][turn + 1 :]) and flops + info(product).flops / 2 > share:
                    break  # this product and later ones go to later waits
                flops += info(product).flops
                out.setdefault(self.nodes[i], []).append(product)
                left.remove(product)
        return out


def _halves(program: Program) -> Iterable[_Half]:
    nodes = list(program.graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    halves: dict[tuple[Layer, bool], _Half] = {}
    for i, node in enumerate(nodes):
        if node.op != "call_function":
            continue
        place = info(node).place
        if place.layer is None:
            continue
        half = halves.setdefault((place.layer, place.phase == "forward"), _Half(nodes, at))
        half.members.append(i)
        if node.target is wait and _is_exchange(node.all_input_nodes[0]):
            half.waits.append(i)
    exchanging = [half for half in halves.values() if half.waits]
    for earlier, half in pairwise(exchanging):
        half.lend_first(earlier)
    return [half for half in exchanging if half.waits]


def _is_exchange(issue: fx.Node) -> bool:
    comm = info(issue).comm
    return comm is not None and comm.of not in ("parameter", "gradient") and comm.kind != "permute"


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
