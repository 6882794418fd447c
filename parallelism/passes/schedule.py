"""Reordering: gathers are issued ahead of their use, reduce-scatters where the gradient is made (SimpleFSDP, 4.2)."""

from __future__ import annotations

from collections import deque

import torch
from torch import fx
from tpshard.parallelism.passes.copy import copied, reorder
from tpshard.parallelism.program import Program, info

funcol = torch.ops._c10d_functional


def schedule(program: Program, prefetch: int = 1, in_flight: int = 1, own: bool = False) -> Program:
    """Issues each bucket's all-gather `prefetch` buckets before its first use; waits stay at the first use.

    Reduce-scatters (and the all-reduces of replicas) are issued as soon as their gradients are there; their waits sink
    until `in_flight` later ones have been issued, which bounds the gradients that wait unsharded. All else runs in its
    order, each node only once something needs it. The order of collectives is the same on every rank: it depends on
    the program alone. Memory grows by at most `prefetch` gathered buckets. `own`: the program is the caller's alone,
    as a pass has just made it, and is changed rather than copied.
    """
    if not own:
        program, _ = copied(program)
    reorder(program.graph, _Scheduler(program, prefetch, in_flight).run())
    return program


class _Scheduler:
    def __init__(self, program: Program, prefetch: int, in_flight: int):
        self.nodes = [n for n in program.graph.nodes if n.op != "output"]
        self.prefetch, self.in_flight = prefetch, in_flight
        self.order: list[fx.Node] = []
        self.done: set[fx.Node] = set()
        self.gathers = [n for n in self.nodes if _moves(n, "parameter")]
        self.scatters = {n for n in self.nodes if _moves(n, "gradient")}
        self.late = self._after(self.scatters)
        """What follows a reduce-scatter: summing into the stored gradient, nothing that computing waits for."""
        lazy = self._only_for(set(self.gathers))
        self.lazy = lazy | set(self.gathers)
        self.missing: dict[fx.Node, int] = {}
        self.ready: deque[fx.Node] = deque()
        self.running: deque[fx.Node] = deque()

    def _after(self, starts: set[fx.Node]) -> set[fx.Node]:
        found = set(starts)
        for node in self.nodes:
            if any(operand in found for operand in node.all_input_nodes):
                found.add(node)
        return found - starts

    def _only_for(self, ends: set[fx.Node]) -> set[fx.Node]:
        """Nodes that serve nothing but these: casts and copies before a gather; and what only serves late nodes."""
        found: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if node.op == "call_function" and node.users and all(u in ends or u in found for u in node.users):
                found.add(node)
        return found

    def run(self) -> list[fx.Node]:
        for node in self.nodes:
            if node.op != "call_function":
                self.emit(node)
        sequence = self._first_uses()
        turn = {gather: i for i, gather in enumerate(sequence)}
        self.sequence, self.turn = sequence, turn
        main = [
            n for n in self.nodes
            if n.op == "call_function" and n not in self.late and n not in self.scatters and n not in self.lazy
            and not _is_wait_of(n, self.gathers) and not self._is_view_of_gather(n)
        ]  # fmt: skip
        early = self._early()
        main.sort(key=early.__getitem__)
        for node in self.scatters:
            self.missing[node] = 0
        producers: dict[fx.Node, list[fx.Node]] = {}
        for scatter in self.nodes:
            if scatter in self.scatters:
                for operand in self._sources(scatter):
                    self.missing[scatter] += 1
                    producers.setdefault(operand, []).append(scatter)
        for node in main:
            if _packs_only(node, self.scatters, self.late):
                continue
            self.demand(node)
            for scatter in producers.get(node, ()):
                self.missing[scatter] -= 1
                if self.missing[scatter] == 0 and scatter not in self.done:
                    self._scatter(scatter)
        for node in self.nodes:
            self.demand(node)
        return self.order

    def _early(self) -> dict[fx.Node, tuple[int, int]]:
        """Order of the nodes: as they are, but casts and sums that only gradients wait for follow their operands.

        They are traced behind the whole backward pass; left there, every gradient would live until then unsharded.
        """
        tail: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if node.op == "call_function" and not info(node).saved and info(node).phase == "backward":
                ends = (u.op == "output" or u in tail or u in self.scatters or u in self.late for u in node.users)
                if all(ends):
                    tail.add(node)
        at: dict[fx.Node, tuple[int, int]] = {}
        for i, node in enumerate(self.nodes):
            at[node] = (i, 0)
            if node in tail and node.all_input_nodes:
                first, second = max(at[operand] for operand in node.all_input_nodes)
                at[node] = (first, second + 1)
        return at

    def _sources(self, scatter: fx.Node) -> set[fx.Node]:
        """The computed values behind a reduce-scatter, seen through its packing."""
        found: set[fx.Node] = set()
        queue = list(scatter.all_input_nodes)
        while queue:
            node = queue.pop()
            if node.op != "call_function":
                continue
            if _packs_only(node, self.scatters, self.late):
                queue.extend(node.all_input_nodes)
            else:
                found.add(node)
        return {n for n in found if n not in self.late}

    def _scatter(self, node: fx.Node) -> None:
        self.demand(node)
        self.running.append(node)
        while len(self.running) > self.in_flight:
            self._finish(self.running.popleft())

    def _finish(self, scatter: fx.Node) -> None:
        """Waits for a reduce-scatter and does what follows from it."""
        queue = deque(sorted(scatter.users))  # in the order of the graph
        seen: set[fx.Node] = set()
        while queue:
            node = queue.popleft()
            if node in seen or node.op == "output":
                continue
            seen.add(node)
            ready = all(o in self.done or o.op != "call_function" for o in node.all_input_nodes)
            if node in self.scatters:  # the replicas' all-reduce of the shard
                if ready and node not in self.done:
                    self._scatter(node)
                continue
            if ready or node not in self.late:
                self.demand(node)
                queue.extend(sorted(node.users))

    def _first_uses(self) -> list[fx.Node]:
        """Gathers in the order in which something first needs them."""
        first: dict[fx.Node, int] = {}
        reach: dict[fx.Node, set[fx.Node]] = {g: {g} for g in self.gathers}
        for i, node in enumerate(self.nodes):
            behind: set[fx.Node] = set()
            for operand in node.all_input_nodes:
                behind |= reach.get(operand, set())
            if not behind or node in self.lazy:
                continue
            if _is_wait_of(node, self.gathers) or self._is_view_of_gather(node):
                reach[node] = behind
                continue
            for gather in behind:
                first.setdefault(gather, i)
        end = len(self.nodes)
        return sorted(self.gathers, key=lambda g: (first.get(g, end), self.nodes.index(g) if g not in first else 0))

    def _is_view_of_gather(self, node: fx.Node) -> bool:
        """Unpacking of a gathered bucket: views and copies made of gathered values alone."""
        if not hasattr(self, "_unpacked"):
            waits = {n for n in self.nodes if _is_wait_of(n, self.gathers)}
            unpacked: set[fx.Node] = set()
            for n in self.nodes:
                inputs = n.all_input_nodes
                if (
                    n.op == "call_function"
                    and inputs
                    and info(n).flops == 0
                    and all(o in waits or o in unpacked for o in inputs)
                ):
                    unpacked.add(n)
            self._unpacked = unpacked
        return node in self._unpacked

    def demand(self, node: fx.Node) -> None:
        """Emits a node after everything that it needs; the first need of a gather issues those that follow it."""
        stack = [node]
        while stack:
            here = stack[-1]
            if here in self.done:
                stack.pop()
                continue
            missing = [o for o in here.all_input_nodes if o not in self.done]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if _is_wait_of(here, self.gathers):
                self._ahead(here.all_input_nodes[0])
            self.emit(here)

    def _ahead(self, gather: fx.Node) -> None:
        at = self.turn[gather]
        for upcoming in self.sequence[at + 1 : at + 1 + self.prefetch]:
            if upcoming not in self.done:
                self.demand(upcoming)

    def emit(self, node: fx.Node) -> None:
        if node not in self.done:
            self.done.add(node)
            self.order.append(node)


def _moves(node: fx.Node, what: str) -> bool:
    if node.op != "call_function":
        return False
    comm = info(node).comm
    return comm is not None and comm.of == what and (what == "gradient" or comm.kind == "all_gather")


def _is_wait_of(node: fx.Node, starts: list[fx.Node]) -> bool:
    if node.target is not funcol.wait_tensor.default:
        return False
    comm = info(node.all_input_nodes[0]).comm
    return comm is not None and comm.of == "parameter" and comm.kind == "all_gather"


def _packs_only(node: fx.Node, scatters: set[fx.Node], late: set[fx.Node]) -> bool:
    """Copies into a bucket: no work, read by nothing but reduce-scatters and their packing."""
    if node.op != "call_function" or info(node).flops or not node.users:
        return False
    return all(user in scatters or (user not in late and _packs_only(user, scatters, late)) for user in node.users)
