"""Propagation: extends a few annotations to a sharding of every value in the graph, each with its cause.

The algorithm is Shardy's (openxla/shardy, `propagation/`): the shardings of an op are projected onto the factors of its
rule, merged there, and projected back, until nothing changes, in four nested loops: user priority > op priority >
aggressive > basic. It works in both directions, through the whole training graph (GSPMD, section 3.5).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tpshard.parallelism.anchors import output
from tpshard.parallelism.factors import FactorAxes, extension, parts, unproject
from tpshard.parallelism.graph import Graph, Op, Value
from tpshard.parallelism.mesh import (
    Axes,
    Axis,
    Mesh,
    common_prefix,
    difference,
    overlap,
    remainder,
    size_of,
    starts_with,
    without,
)
from tpshard.parallelism.propagated import Annotation, Cause, Conflict, Shardings
from tpshard.parallelism.rules.rule import Direction, Kind, Rule
from tpshard.parallelism.rules.table import entry_of, rule_for
from tpshard.parallelism.sharding import Sharding
from tpshard.parallelism.why import TIE, Through, through


class Loop(NamedTuple):
    """An inner loop of propagation: the ops that take part (level 0 to 4, see `_directions`), and its strategy."""

    level: int
    aggressive: bool


LOOPS = tuple(Loop(level, aggressive) for level in range(5) for aggressive in (False, True))
"""The loops of every user priority, each run to a fixpoint."""


class Tie:
    """Values with one common sharding: a parameter, its gradient, its optimizer state."""

    name = "tie"
    target = "tie"

    def __init__(self, values: Sequence[Value]):
        self.operands: list[Value] = []
        self.results = list(values)
        rank = values[0].rank
        dims = tuple((i,) for i in range(rank))
        self.rule = Rule((), (dims,) * len(values), values[0].shape, (Kind.PASS,) * rank, priority=0)


@dataclass(eq=False)
class Edge:
    """An op (or tie) as propagation sees it: its tensors and their factors."""

    op: Op | Tie
    rule: Rule
    tensors: list[Value]
    form: int
    """Equal for edges that propagation cannot distinguish, such as those of equal layers."""
    pointwise: bool
    directions: tuple[tuple[Direction, ...], ...]
    """The direction per level and factor."""


class EdgeChange(NamedTuple):
    """The changes that a visit of an edge makes, independent of the names of its tensors."""

    factors: tuple[tuple[int, dict[int, Axes]], ...]
    """Changes as (tensor, its axes per factor)."""
    sources: dict[tuple[int, int], int]
    """The tensor from which the axes of each (tensor, factor) came."""
    conflicts: tuple[tuple[int, Axes, Axes], ...]
    """Conflicts as (tensor, axes it did not get, axes that prevented it)."""


def propagate(
    graph: Graph, mesh: Mesh, annotations: Mapping[Value, Annotation], ties: Sequence[Sequence[Value]] = (),
    rules: Mapping[Op, Rule] | None = None, loops: Sequence[Loop] = LOOPS,
) -> Shardings:  # fmt: skip
    """Extends `annotations` over the whole graph. Deterministic and idempotent; closed dims never change.

    ties: groups of values with one sharding. rules: the rules of the graph's ops, if an earlier propagation computed
    them. loops: the inner loops, for tests of a single one.
    """
    return _Propagation(graph, mesh, annotations, ties, rules, loops).run()


def _directions(rule: Rule, single_use: bool, broadcasts: bool) -> tuple[tuple[Direction, ...], ...]:
    """The direction in which an op propagates each factor, for each level; higher levels include the lower ones.

    0: pass-through ops whose operands have no other reader. 1: all pass-through ops. 2: factors that pass through, of
    any op; broadcasts only backward. 3: all factors. 4: broadcasts forward too.
    """
    backward = Direction.BACKWARD if broadcasts else Direction.BOTH
    passing = tuple(backward if kind is Kind.PASS else Direction.NONE for kind in rule.kinds)
    levels = [(Direction.NONE,) * len(rule.kinds)] * 2 + [passing]
    levels += [(backward,) * len(rule.kinds), (Direction.BOTH,) * len(rule.kinds)]
    if rule.priority == 0 and not broadcasts:
        at = 0 if single_use else 1
        levels[at:] = [(Direction.BOTH,) * len(rule.kinds)] * (5 - at)
    allowed = [Direction.NONE if f in rule.blocked else rule.direction for f in range(len(rule.kinds))]
    return tuple(tuple(map(operator.and_, level, allowed)) for level in levels)


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
        for value in graph.values():
            self._set(value, Sharding.unknown(value.rank))
        self.causes: dict[tuple[Value, int], list[tuple[Axis, Cause]]] = {}
        self.annotated = dict(annotations)
        self.conflicts: dict[tuple[str, Value, Axes], Conflict] = {}
        for value, annotation in annotations.items():
            self._set(value, annotation.sharding)
            for dim, axes in enumerate(annotation.sharding.dims):
                for axis in axes:
                    self.causes.setdefault((value, dim), []).append(
                        (axis, Cause(None, None, dim, annotation.written_at))
                    )
        self.rules = dict(rules) if rules is not None else {op: rule_for(op) for op in graph.ops}
        self.edges: list[Edge] = []
        self.forms: dict[tuple[object, ...], int] = {}
        self.moves: dict[tuple[object, ...], EdgeChange | None] = {}
        """Cached results of visits; None for a visit without effect."""
        members: list[Op | Tie] = [*graph.ops, *map(Tie, ties)]
        for op in members:
            rule = op.rule if isinstance(op, Tie) else self.rules[op]
            entry = entry_of(op.target)
            pointwise = rule.priority == 0 and entry.view is None
            single = all(len(v.users) <= 1 or not v.rank for v in op.operands)
            directions = _directions(rule, single, entry.broadcasts)
            signature = (rule.operands, rule.results, rule.sizes, pointwise, directions)
            form = self.forms.setdefault(signature, len(self.forms))
            edge = Edge(op, rule, [*op.operands, *op.results], form, pointwise, directions)
            self.edges.append(edge)
        self.results = [edge for edge in self.edges if edge.op.target is output]
        self.ties: dict[Value, Edge] = {v: e for e in self.edges if isinstance(e.op, Tie) for v in e.tensors}
        self.touching: dict[Value, list[Edge]] = {}
        """The edges to visit after a change of a value: its producer, then its readers from last to first.

        The last one of this list is visited first.
        """
        for edge in reversed(self.edges):
            for value in dict.fromkeys(edge.tensors):
                if edge.op.target is not output and not isinstance(edge.op, Tie):
                    self.touching.setdefault(value, []).append(edge)
        for value, near in self.touching.items():
            near.sort(key=lambda edge: edge.op is not value.producer)

    def _set(self, value: Value, sharding: Sharding) -> None:
        self.state[value] = self.shardings.setdefault(sharding, sharding)

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
        for value, written in parked.items():
            self._set(value, replace(self.state[value], priority=written.priority))
        for edge in dict.fromkeys(self.ties.values()):
            self._close_alike(edge.tensors)
        return Shardings(
            self.mesh, self.graph, self.state, self.rules, self.causes, self.annotated, list(self.conflicts.values())
        )

    def _close_alike(self, tied: Sequence[Value]) -> None:
        """Closes the dims of tied values that are closed, with the same axes, in one of them."""
        closed = {(d, s.dims[d]) for s in map(self.state.__getitem__, tied) for d, is_open in enumerate(s.open)
                  if not is_open}  # fmt: skip
        for value in tied:
            now = self.state[value]
            opens = tuple(o and (d, now.dims[d]) not in closed for d, o in enumerate(now.open))
            self._set(value, replace(now, open=opens))

    def _park(self, value: Value, written: Sharding) -> None:
        """Empties and closes the dims whose priority is later, and keeps their axes off the value's other dims."""
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

    # ---- one op -------------------------------------------------------------------------------------------
    def _visit(self, edge: Edge, loop: Loop) -> list[Value]:
        """Propagates axes between an edge's tensors; returns the changed values, tied ones included."""
        shardings = [self.state[v] for v in edge.tensors]
        key = (edge.form, loop, *map(id, shardings))
        if key not in self.moves:
            self.moves[key] = self._change_of(edge, shardings, loop)
        moved = self.moves[key]
        if moved is None:
            return []
        for t, lost, room in moved.conflicts:
            place = (edge.op.name, edge.tensors[t], lost)
            self.conflicts.setdefault(place, Conflict(edge.op.name, edge.tensors[t], lost, room))
        changed: list[Value] = []
        for t, factors in moved.factors:
            self._write_back(edge, t, shardings[t], factors, moved.sources, changed)
        for value in list(changed):
            if value in self.ties and self.ties[value] is not edge:
                changed += self._visit(self.ties[value], loop)
        return changed

    def _change_of(self, edge: Edge, shardings: list[Sharding], loop: Loop) -> EdgeChange | None:
        if not any(axes for s in shardings for axes in s.dims):
            return None
        step = _Step(edge, shardings, loop)
        (step.aggressive if loop.aggressive else step.basic)()
        changed = tuple(
            (t, {f: part.axes for f, part in new.items()})
            for t, (old, new) in enumerate(zip(step.before, step.parts)) if old != new
        )  # fmt: skip
        return EdgeChange(changed, step.sources, tuple(step.conflicts)) if changed or step.conflicts else None

    def _write_back(
        self, edge: Edge, t: int, sharding: Sharding, factors: dict[int, Axes], sources: dict[tuple[int, int], int],
        changed: list[Value],
    ) -> None:  # fmt: skip
        value = edge.tensors[t]
        for dim, members in enumerate(edge.rule.tensors[t]):
            if not any((t, f) in sources for f in members):
                continue
            new = unproject(members, factors, edge.rule.sizes)
            old = self.state[value].dims[dim]
            if new == old or not starts_with(new, old):
                continue
            others = [a for d, axes in enumerate(self.state[value].dims) if d != dim for a in axes]
            if any(overlap(a, others) for a in remainder(new, old)):  # one value is two operands of this op
                continue
            self._set(value, self.state[value].with_dim(dim, new))
            for f in members:
                if (t, f) not in sources:
                    continue
                source = sources[(t, f)]
                source_dim = next(d for d, fs in enumerate(edge.rule.tensors[source]) if f in fs)
                cause = Cause(_through(edge.op), edge.tensors[source], source_dim)
                for axis in difference(factors[f], old):
                    self.causes.setdefault((value, dim), []).append((axis, cause))
            changed.append(value)


class _Step:
    """A visit of one edge: propagates axes between its tensors, factor by factor."""

    def __init__(self, edge: Edge, shardings: list[Sharding], loop: Loop):
        rule = edge.rule
        self.edge, self.sizes, self.count = edge, rule.sizes, len(rule.operands)
        self.barred = [s.barred for s in shardings]
        self.before = [parts(s.dims, s.open, dims, rule.sizes) for s, dims in zip(shardings, rule.tensors)]
        self.parts = [dict(p) for p in self.before]
        self.directions = edge.directions[loop.level]
        self.sources: dict[tuple[int, int], int] = {}
        self.conflicts: list[tuple[int, Axes, Axes]] = []

    def basic(self) -> None:
        """Gives all tensors, for each factor, the axes on which they agree, up to the first conflict in any tensor."""
        for f in range(len(self.sizes)):
            axes = self.compatible(f)
            for t in range(len(self.parts)) if axes else ():
                others = self.others(t, f)
                if f in self.parts[t]:
                    axes = extension(self.parts[t][f], axes, self.sizes[f], (*self.barred[t], *others))
                else:
                    axes = without(axes, others)
            for t in range(len(self.parts)) if axes else ():
                self.expand(t, f, axes)

    def aggressive(self) -> None:
        """Gives every tensor the axes that it can have, whatever the others can; results before operands.

        Of factors that compete for an axis wins the one with the largest source tensor, then (for pointwise ops) the
        most axes, the lowest tensor and the lowest factor.
        """
        candidates = [self.compatible(f) for f in range(len(self.sizes))]
        if not any(candidates):
            return
        volumes = [size_of_factors(self.sizes, p) for p in self.parts]

        def rank(f: int) -> tuple[int, int, int, int]:
            sources = [t for t, p in enumerate(self.parts) if f in p and starts_with(p[f].axes, candidates[f])]
            source = max(sources, key=lambda t: (volumes[t], -t), default=-1)
            axes = size_of(candidates[f]) if self.edge.pointwise else 0
            return (-volumes[source] if sources else 1, -axes, source, f)

        order = sorted((f for f in range(len(self.sizes)) if candidates[f]), key=rank)
        for t in (*range(self.count, len(self.parts)), *range(self.count)):
            for f in order:
                part = self.parts[t].get(f)
                if part is None:
                    continue
                free = extension(part, candidates[f], self.sizes[f], self.barred[t])
                if free == part.axes or not starts_with(free, part.axes):
                    continue
                others = self.others(t, f)
                axes = extension(part, free, self.sizes[f], others)
                if axes != free:
                    self.conflicts.append((t, remainder(free, axes), others))
                if self.edge.pointwise and t < self.count:  # an operand is never sharded more than its result
                    for result in self.parts[self.count :]:
                        if f in result and result[f].axes != axes and starts_with(axes, result[f].axes):
                            axes = result[f].axes
                self.expand(t, f, axes)

    def compatible(self, f: int) -> Axes:
        """The longest list of axes of a factor, from the outermost, on which its tensors agree.

        In a one-directional step only the source tensors extend it; the others may shorten it.
        """
        direction = self.directions[f]
        if direction is Direction.NONE:
            return ()
        operands, results = self.parts[: self.count], self.parts[self.count :]
        agreed: Axes = ()
        grows = True
        for group in (results, operands) if direction is Direction.BACKWARD else (operands, results):
            for tensor in group:
                if f not in tensor:
                    continue
                mine = tensor[f].axes
                shared = common_prefix(agreed, mine)
                if shared == agreed:
                    agreed = mine if grows else agreed
                elif shared != mine:
                    agreed, grows = shared, False
            grows = grows and direction is Direction.BOTH
        return agreed

    def others(self, t: int, f: int) -> Axes:
        """The axes of a tensor's other factors."""
        return tuple(a for g, part in self.parts[t].items() if g != f for a in (*part.axes, *part.overflow))

    def expand(self, t: int, f: int, axes: Axes) -> None:
        """Extends the axes of a tensor's factor, and records the tensor that they come from."""
        part = self.parts[t].get(f)
        if part is None or axes == part.axes or not starts_with(axes, part.axes):
            return
        self.parts[t][f] = part._replace(axes=axes)
        self.sources[(t, f)] = next(
            s for s, p in enumerate(self.before) if s != t and f in p and starts_with(p[f].axes, axes)
        )


def size_of_factors(sizes: Sequence[int], tensor: Mapping[int, FactorAxes]) -> int:
    """The number of elements of a tensor, from its factors."""
    return math.prod(sizes[f] for f in tensor)


def _through(op: Op | Tie) -> Through:
    return TIE if isinstance(op, Tie) else through(op)
