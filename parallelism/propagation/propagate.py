"""Propagation: extends a few annotations to a sharding of every value in the graph, each with its cause.

The algorithm is Shardy's (openxla/shardy, `propagation/`): the shardings of an op are projected onto the factors of its
rule, merged there, and projected back, until nothing changes, in four nested loops: user priority > op priority >
aggressive > basic. It works in both directions, through the whole training graph (GSPMD, section 3.5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from tpshard.parallelism.anchors import output
from tpshard.parallelism.factors import parts, refilled, unproject
from tpshard.parallelism.graph import Graph, Op, Value
from tpshard.parallelism.mesh import Axes, Axis, Mesh, difference, overlap, remainder, size_of, starts_with
from tpshard.parallelism.propagated import Annotation, Cause, Shardings
from tpshard.parallelism.propagation.propagation_step import Edge, EdgeChange, EdgeVisit, directions, tie
from tpshard.parallelism.rules.control_flow import every_graph
from tpshard.parallelism.rules.control_flow_rule import parts_of
from tpshard.parallelism.rules.rule import Rule
from tpshard.parallelism.rules.table import entry_of, rule_for
from tpshard.parallelism.sharding import Sharding
from tpshard.parallelism.why import through


class Loop(NamedTuple):
    """The settings of an inner loop of propagation: which ops take part (`level`, see `directions`) and how."""

    level: int
    aggressive: bool


LOOPS = tuple(Loop(level, aggressive) for level in range(5) for aggressive in (False, True))
"""The loops of every user priority, each run to a fixpoint."""


def propagate(
    graph: Graph, mesh: Mesh, annotations: Mapping[Value, Annotation], ties: Sequence[Sequence[Value]] = (),
    rules: Mapping[Op, Rule] | None = None, loops: Sequence[Loop] = LOOPS,
) -> Shardings:  # fmt: skip
    """Computes a sharding of every value of a graph from the annotations of some. Closed dims never change.

    The result is deterministic, and propagating it again changes nothing.

    ties: groups of values with one sharding. rules: the rules of the graph's ops, if an earlier propagation computed
    them. loops: the inner loops, for tests of a single one.
    """
    return _Propagation(graph, mesh, annotations, ties, rules, loops).run()


class _Propagation:
    """The state of a propagation: the current sharding of every value, and the causes so far."""

    def __init__(
        self, graph: Graph, mesh: Mesh, annotations: Mapping[Value, Annotation], ties: Sequence[Sequence[Value]],
        rules: Mapping[Op, Rule] | None, loops: Sequence[Loop],
    ):  # fmt: skip
        self.mesh, self.graph, self.loops = mesh, graph, loops
        self.shardings: dict[Sharding, Sharding] = {}
        self.state: dict[Value, Sharding] = {}
        """The current shardings. Equal ones are one object, so that visits can be cached by identity."""
        self.identity: dict[Value, int] = {}
        """The identity of each value's sharding."""
        graphs = list(every_graph(graph))
        ops = [op for each in graphs for op in each.ops]
        for value in (value for each in graphs for value in each.values()):
            self._set(value, Sharding.unknown(value.rank))
        self.causes: dict[tuple[Value, int], list[tuple[Axis, Cause]]] = {}
        self.annotated = dict(annotations)
        for value, annotation in annotations.items():
            self._set(value, annotation.sharding)
            for dim, axes in enumerate(annotation.sharding.dims):
                for axis in axes:
                    self.causes.setdefault((value, dim), []).append(
                        (axis, Cause(None, None, dim, annotation.written_at))
                    )
        self.rules = dict(rules) if rules is not None else {}
        self.rules |= {op: rule_for(op) for op in ops if op not in self.rules}
        self.edges: list[Edge] = []
        self.forms: dict[tuple[object, ...], int] = {}
        self.moves: dict[Loop, dict[tuple[int, ...], EdgeChange | None]] = {}
        """Cached results of visits by form and identities of shardings; None for a visit without effect."""
        tied = dict(map(tie, ties))
        parts = [part for op in ops for part in parts_of(op, self.rules[op])]
        for op, rule, tensors in [*parts, *((op, rule, op.results) for op, rule in tied.items())]:
            entry = entry_of(op.target)
            pointwise = rule.priority == 0 and entry.view is None
            single = all(len(v.users) <= 1 or not v.rank for v in op.operands)
            ways = directions(rule, single, entry.broadcasts)
            signature = (rule.operands, rule.results, rule.sizes, pointwise, ways)
            form = self.forms.setdefault(signature, len(self.forms))
            edge = Edge(op, rule, tensors, form, pointwise, ways)
            self.edges.append(edge)
        self.results = [edge for edge in self.edges if edge.op.target is output]
        self.ties: dict[Value, Edge] = {v: e for e in self.edges if e.op in tied for v in e.tensors}
        self.touching: dict[Value, list[Edge]] = {}
        """The edges to visit after a change of a value: its producer, then its readers from last to first.

        The last one of this list is visited first.
        """
        for edge in reversed(self.edges):
            for value in dict.fromkeys(edge.tensors):
                if edge.op.target is not output and edge.op not in tied:
                    self.touching.setdefault(value, []).append(edge)
        for value, near in self.touching.items():
            near.sort(key=lambda edge: edge.op is not value.producer)

    def _set(self, value: Value, sharding: Sharding) -> None:
        one = self.state[value] = self.shardings.setdefault(sharding, sharding)
        self.identity[value] = id(one)

    # ---- the four loops -----------------------------------------------------------------------------------
    def run(self) -> Shardings:
        parked = {value: sharding for value, sharding in self.state.items() if sharding.priority}
        for value, sharding in parked.items():
            self._park(value, sharding)
        for current in sorted({0} | {p for s in parked.values() if s.priority for p in s.priority}):
            for value, written in parked.items():
                self._restore(value, written, current)
            for loop in self.loops:
                self._to_fixpoint(loop)
        for edge in self.edges:
            if entry_of(edge.op.target).view and self._pass_unevenly(edge):
                for loop in self.loops:
                    self._to_fixpoint(loop)
        for value, written in parked.items():
            self._set(value, replace(self.state[value], priority=written.priority))
        for edge in dict.fromkeys(self.ties.values()):
            self._close_alike(edge.tensors)
        return Shardings(self.mesh, self.graph, self.state, self.rules, self.causes, self.annotated)

    def _close_alike(self, tied: Sequence[Value]) -> None:
        """Closes each dim of tied values that has the same axes as that dim of another of them which is closed."""
        closed = {(d, s.dims[d]) for s in map(self.state.__getitem__, tied) for d, is_open in enumerate(s.open)
                  if not is_open}  # fmt: skip
        for value in tied:
            now = self.state[value]
            opens = tuple(o and (d, now.dims[d]) not in closed for d, o in enumerate(now.open))
            self._set(value, replace(now, open=opens))

    def _park(self, value: Value, written: Sharding) -> None:
        """Removes the axes of dims with a priority above 0 until their turn; other dims may not get them meanwhile."""
        assert written.priority is not None
        later = [priority > 0 for priority in written.priority]
        axes = [axis for dim, parked in zip(written.dims, later) if parked for axis in dim]
        self._set(value, replace(
            written, dims=tuple(() if parked else dim for dim, parked in zip(written.dims, later)),
            open=tuple(is_open and not parked for is_open, parked in zip(written.open, later)),
            replicated=written.replicated | set(axes), priority=None,
        ))  # fmt: skip

    def _restore(self, value: Value, written: Sharding, current: int) -> None:
        """Gives the dims of priority `current` the sharding that the user wrote."""
        assert written.priority is not None
        now = self.state[value]
        back = [priority == current > 0 for priority in written.priority]
        axes = [axis for dim, restored in zip(written.dims, back) if restored for axis in dim]
        self._set(value, replace(
            now, dims=tuple(w if restored else n for w, n, restored in zip(written.dims, now.dims, back)),
            open=tuple(w if restored else n for w, n, restored in zip(written.open, now.open, back)),
            replicated=now.replicated - set(axes) | written.replicated,
        ))  # fmt: skip

    def _to_fixpoint(self, loop: Loop) -> None:
        """Visits the edges that take part in a loop until nothing changes.

        Edges are visited in the graph's order, but those affected by a change come next. The function's results are
        visited before and after.
        """
        self._visit_results(loop)
        stack = [edge for edge in reversed(self.edges) if any(edge.directions[loop.level])]
        active = set(stack)
        waiting = set(stack)
        while stack:
            edge = stack.pop()
            waiting.discard(edge)
            for value in self._visit(edge, loop):
                for other in self.touching.get(value, ()):
                    if other is not edge and other in active and other not in waiting:
                        waiting.add(other)
                        stack.append(other)
        self._visit_results(loop)

    def _visit_results(self, loop: Loop) -> None:
        for edge in self.results:
            self._visit(edge, Loop(4, loop.aggressive))

    def _pass_unevenly(self, edge: Edge) -> bool:
        """Shards dims of a view's result that would be whole over axes of its operand that do not divide a factor of
        them; returns whether there are any. Devices then send what crosses the ends of parts (15 as [3, 5]), or shards
        change places (where the part is merged behind another)."""
        if len(edge.op.operands) != 1 or len(edge.op.results) != 1:
            return False
        (read, value), (before, after), sizes = edge.tensors, edge.rule.tensors, edge.rule.sizes
        if before == after:  # an identity passes all that it may, as a barrier says
            return False
        found = False
        for f, part in parts(self.state[read].dims, self.state[read].open, before, sizes).items():
            now, axes = self.state[value], part.axes or part.overflow
            dim = next((d for d, members in enumerate(after) if f in members), None)
            if not axes or dim is None or not now.open[dim]:
                continue
            first, old = after[dim][0], now.dims[dim]
            if first != f:
                new = refilled(after[dim], {first: old, f: axes}, sizes)
                new = new if old or new else axes if size_of(axes) <= sizes[first] else ()
            else:
                new = () if old else axes
            more = remainder(new, old) if starts_with(new, old) else ()
            taken = any(overlap(axis, (*now.axes, *now.barred)) for axis in more)
            if not more or taken or size_of(new) > value.shape[dim]:
                continue
            self._set(value, now.with_dim(dim, new))
            source = next(d for d, members in enumerate(before) if f in members)
            cause = Cause(through(edge.op), read, source)
            self.causes.setdefault((value, dim), []).extend((axis, cause) for axis in more)
            found = True
        return found

    # ---- one op -------------------------------------------------------------------------------------------
    def _visit(self, edge: Edge, loop: Loop) -> list[Value]:
        """Propagates axes between an edge's tensors; returns the changed values, tied ones included."""
        moves, key = self.moves.setdefault(loop, {}), (edge.form, *map(self.identity.__getitem__, edge.tensors))
        if key not in moves:
            moves[key] = self._change_of(edge, [self.state[v] for v in edge.tensors], loop)
        moved = moves[key]
        if moved is None:
            return []
        changed: list[Value] = []
        for t, factors in moved.factors:
            self._write_back(edge, t, factors, moved.sources, changed, loop == LOOPS[-1])
        for value in list(changed):
            if value in self.ties and self.ties[value] is not edge:
                changed += self._visit(self.ties[value], loop)
        return changed

    def _change_of(self, edge: Edge, shardings: list[Sharding], loop: Loop) -> EdgeChange | None:
        if not any(axes for s in shardings for axes in s.dims):
            return None
        step = EdgeVisit(edge, shardings, loop.level)
        (step.aggressive if loop.aggressive else step.basic)()
        changed = tuple(
            (t, {f: part.axes for f, part in new.items()})
            for t, (old, new) in enumerate(zip(step.before, step.parts)) if old != new
        )  # fmt: skip
        return EdgeChange(changed, step.sources) if changed else None

    def _write_back(
        self, edge: Edge, t: int, factors: dict[int, Axes], sources: dict[tuple[int, int], int], changed: list[Value],
        last: bool,
    ) -> None:  # fmt: skip
        value = edge.tensors[t]
        for dim, members in enumerate(edge.rule.tensors[t]):
            moved = [f for f in members if (t, f) in sources]
            if not moved:
                continue
            new = unproject(members, factors, edge.rule.sizes)
            old = self.state[value].dims[dim]
            if last and len(members) > 1 and value in edge.op.results and entry_of(edge.op.target).view:
                new = max(new, refilled(members, factors, edge.rule.sizes), key=size_of)
            if new == old or not starts_with(new, old):
                continue
            others = [a for d, axes in enumerate(self.state[value].dims) if d != dim for a in axes]
            if any(overlap(a, others) for a in remainder(new, old)):  # one value is two operands of this op
                continue
            self._set(value, self.state[value].with_dim(dim, new))
            for f in moved:
                source = sources[(t, f)]
                source_dim = next(d for d, fs in enumerate(edge.rule.tensors[source]) if f in fs)
                cause = Cause(through(edge.op), edge.tensors[source], source_dim)
                for axis in difference(factors[f], old):
                    self.causes.setdefault((value, dim), []).append((axis, cause))
            changed.append(value)
