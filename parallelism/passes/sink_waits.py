"""A pass that moves waits for reduced gradients behind later computation (SimpleFSDP, section 4.2)."""

from __future__ import annotations

from collections import deque

from torch import fx
from tpshard.parallelism.passes.moves import Moves, find_moves
from tpshard.parallelism.passes.order import NodeOrder
from tpshard.parallelism.program import Program


def sink_waits(program: Program, in_flight: int = 1) -> Program:
    """Moves the wait for each gradient reduction, and what uses its shard, behind the issue of `in_flight` others.

    This bounds the number of unsharded gradients. A further reduction, of shards over other axes, is issued there too;
    it holds a shard alone and counts as none.
    """
    moves, order = find_moves(program), NodeOrder(program.graph)
    sinking = _Sinking(moves, order, in_flight)
    for node in order.old:
        if node in moves.reductions:
            sinking.issue(node)
        elif node not in moves.reduced:
            order.add(node)
    order.apply()
    return program.with_new_order()


class _Sinking:
    """Issues and waits for reductions in the new order, and keeps those in flight."""

    def __init__(self, moves: Moves, order: NodeOrder, in_flight: int):
        self.moves, self.order, self.in_flight = moves, order, in_flight
        self.running: deque[tuple[fx.Node, bool]] = deque()
        """The reductions in flight, each with whether it is of unsharded gradients."""

    def issue(self, reduction: fx.Node, *, unsharded: bool = True) -> None:
        """Issues a reduction whose operands are ready, and waits for the oldest ones if too many are in flight."""
        if reduction in self.order.done or not self.order.can(reduction):
            return
        self.order.add(reduction)
        self.running.append((reduction, unsharded))
        while sum(whole for _, whole in self.running) > self.in_flight:
            self.finish(self.running.popleft()[0])

    def finish(self, reduction: fx.Node) -> None:
        """Appends the wait for a reduction and the nodes behind it, except for those that need another reduction."""
        queue = deque(sorted(reduction.users))  # in graph order
        visited: set[fx.Node] = set()
        while queue:
            node = queue.popleft()
            if node in visited or node.op == "output":
                continue
            visited.add(node)
            if node in self.moves.reductions:  # a further reduction: of the shards, over the replicas
                self.issue(node, unsharded=False)
            elif self.order.can(node):
                self.order.add(node)
                queue.extend(sorted(node.users))
