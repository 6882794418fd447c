"""propagate: a few annotations -> a sharding for every value of the graph, each with its cause.

The algorithm is Shardy's (openxla/shardy, `propagation/`): an op's shardings are projected onto the factors of its
rule, merged there, and projected back, to a fixpoint, in four nested loops: user priority > op priority >
aggressive > basic. Both directions, through the whole training graph (GSPMD, section 3.5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tpshard.parallelism.factors import divisor, limit, project, unproject
from tpshard.parallelism.graph import Graph, Op, Value
from tpshard.parallelism.mesh import Axes, Axis, Mesh, common_prefix, merge, overlap, remainder, size_of, starts_with
from tpshard.parallelism.propagated import Annotation, Cause, Conflict, Shardings
from tpshard.parallelism.rules.rule import Kind, Rule
from tpshard.parallelism.rules.table import entry_of, rule_for
from tpshard.parallelism.sharding import Sharding


class Tie:
    """Values that are to share one sharding: a parameter, its gradient, its optimizer state."""

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
    """One op (or tie) as propagation sees it: its tensors and their factors."""

    op: Op | Tie
    rule: Rule
    tensors: list[Value]
    form: int
    """Equal for edges that propagation cannot tell apart: the layers of a model are alike."""
    single_use: bool
    pointwise: bool
    broadcast: bool


class Moved(NamedTuple):
    """What visiting an edge does, whatever its tensors are called."""

    factors: tuple[tuple[int, dict[int, Axes]], ...]
    """(tensor, its axes per factor) where they change."""
    sources: dict[tuple[int, int], int]
    """(tensor, factor) -> tensor that its axes came from."""
    conflicts: tuple[tuple[int, Axes, Axes], ...]
    """(tensor, axes it did not get, what was in their way)."""


def propagate(
    graph: Graph, mesh: Mesh, annotations: Mapping[Value, Annotation], ties: Sequence[Sequence[Value]] = (),
    rules: Mapping[Op, Rule] | None = None,
) -> Shardings:  # fmt: skip
    """Extends `annotations` over the whole graph. Deterministic, idempotent; a closed dim is never touched.

    `rules`: those of the graph's ops, where an earlier propagation of the same graph has made them.
    """
    return _Propagation(graph, mesh, annotations, ties, rules).run()


class _Propagation:
    def __init__(
        self, graph: Graph, mesh: Mesh, annotations: Mapping[Value, Annotation], ties: Sequence[Sequence[Value]],
        rules: Mapping[Op, Rule] | None,
    ):  # fmt: skip
        self.mesh, self.graph = mesh, graph
        self.shardings: dict[Sharding, Sharding] = {}
        self.state: dict[Value, Sharding] = {}
        """Equal shardings are one object, so that what visits depend on is compared by identity."""
        for value in graph.values():
            self._set(value, Sharding.unknown(value.rank))
        self.causes: dict[tuple[Value, int], list[tuple[Axis, Cause]]] = {}
        self.annotated = dict(annotations)
        self.reserved: dict[Value, Axes] = {}
        """Axes of dims that are still parked: no other dim of the value may take them."""
        self.conflicts: dict[tuple[str, Value, Axes], Conflict] = {}
        for value, annotation in annotations.items():
            self._set(value, annotation.sharding)
            for dim, axes in enumerate(annotation.sharding.dims):
                for axis in axes:
                    self.causes.setdefault((value, dim), []).append((axis, Cause("", None, dim, annotation.where)))
        self.rules = dict(rules) if rules is not None else {op: rule_for(op) for op in graph.ops}
        self.edges: list[Edge] = []
        self.forms: dict[tuple[object, ...], int] = {}
        self.moves: dict[tuple[object, ...], Moved | None] = {}
        """What is known of visits: None where nothing comes of one."""
        members: list[Op | Tie] = [*graph.ops, *map(Tie, ties)]
        for op in members:
            rule = op.rule if isinstance(op, Tie) else self.rules[op]
            entry = entry_of(op.target)
            pointwise = rule.priority == 0 and entry.view is None
            single = all(len(v.users) <= 1 for v in op.operands)
            tensors = [*op.operands, *op.results]
            known = (rule.operands, rule.results, rule.sizes, rule.kinds, rule.priority, pointwise, entry.broadcasts,
                     *(v.numel for v in tensors))  # fmt: skip
            form = self.forms.setdefault(known, len(self.forms))
            self.edges.append(Edge(op, rule, tensors, form, single, pointwise, entry.broadcasts))
        self.touching: dict[Value, list[Edge]] = {}
        for edge in self.edges:
            for value in set(edge.tensors):
                self.touching.setdefault(value, []).append(edge)

    def _set(self, value: Value, sharding: Sharding) -> None:
        self.state[value] = self.shardings.setdefault(sharding, sharding)

    # ---- the four loops -----------------------------------------------------------------------------------
    def run(self) -> Shardings:
        parked: dict[Value, Sharding] = {}
        rounds = sorted({0} | {p for s in self.state.values() if s.priority for p in s.priority})
        for value, sharding in self.state.items():
            if sharding.priority:
                parked[value] = sharding
        for current in rounds:
            for value, wanted in parked.items():
                self._restore(value, wanted, current)
            self._by_op_priority()
        return Shardings(
            self.mesh, self.graph, self.state, self.rules, self.causes, self.annotated, list(self.conflicts.values())
        )

    def _restore(self, value: Value, wanted: Sharding, current: int) -> None:
        """Brings dims of priority `current` to what the user wrote; later ones stay parked: empty and closed."""
        assert wanted.priority is not None
        self.reserved[value] = tuple(
            axis for axes, later in zip(wanted.dims, wanted.priority) if later > current for axis in axes
        )
        dims, opens = [], []
        now = self.state[value]
        for dim, priority in enumerate(wanted.priority):
            if priority == current:
                dims.append(wanted.dims[dim])
                opens.append(wanted.open[dim])
            elif priority > current:
                dims.append(())
                opens.append(False)
            else:
                dims.append(now.dims[dim])
                opens.append(now.open[dim])
        self._set(value, replace(wanted, dims=tuple(dims), open=tuple(opens)))

    def _by_op_priority(self) -> None:
        for level in range(5):
            for aggressive in (False, True):
                self._to_fixpoint(level, aggressive)

    def _to_fixpoint(self, level: int, aggressive: bool) -> None:
        active = [edge for edge in self.edges if self._takes_part(edge, level)]
        waiting = set(active)
        members = set(active)
        queue = deque(active)
        while queue:
            edge = queue.popleft()
            waiting.discard(edge)
            for value in self._visit(edge, level, aggressive):
                for other in self.touching[value]:
                    if other in members and other not in waiting:
                        waiting.add(other)
                        queue.append(other)

    def _takes_part(self, edge: Edge, level: int) -> bool:
        if not edge.tensors:
            return False
        if level == 0:
            return edge.rule.priority == 0 and edge.single_use and not edge.broadcast
        if level == 1:
            return edge.rule.priority == 0 and not edge.broadcast
        return True

    # ---- one op -------------------------------------------------------------------------------------------
    def _visit(self, edge: Edge, level: int, aggressive: bool) -> list[Value]:
        shardings = [self.state[v] for v in edge.tensors]
        kinds_too, forward_too = level >= 3, level >= 4 or not edge.broadcast
        key: tuple[object, ...] = (edge.form, kinds_too, forward_too, aggressive, *map(id, shardings))
        if self.reserved:
            key += tuple(self.reserved.get(v, ()) for v in edge.tensors)
        if key not in self.moves:
            self.moves[key] = self._moved(edge, shardings, kinds_too, forward_too, aggressive)
        moved = self.moves[key]
        if moved is None:
            return []
        for t, lost, room in moved.conflicts:
            place = (edge.op.name, edge.tensors[t], lost)
            self.conflicts.setdefault(place, Conflict(edge.op.name, edge.tensors[t], lost, room))
        changed: list[Value] = []
        for t, factors in moved.factors:
            self._write_back(edge, t, shardings[t], factors, moved.sources, changed)
        return changed

    def _moved(
        self, edge: Edge, shardings: list[Sharding], kinds_too: bool, forward_too: bool, aggressive: bool
    ) -> Moved | None:
        if not any(axes for s in shardings for axes in s.dims):
            return None
        rule = edge.rule
        projected = [
            project(s.dims, dims, rule.sizes) for s, dims in zip(shardings, rule.tensors)
        ]
        before = [dict(p) for p in projected]
        sources: dict[tuple[int, int], int] = {}
        factors = [
            f for f in range(len(rule.sizes))
            if kinds_too or rule.kinds[f] is Kind.PASS
        ]  # fmt: skip
        conflicts: list[tuple[int, Axes, Axes]] = []
        if aggressive:
            self._aggressive(edge, projected, shardings, factors, not forward_too, sources, conflicts)
        else:
            self._basic(edge, projected, shardings, factors, not forward_too, sources)
        changed = tuple((t, new) for t, (old, new) in enumerate(zip(before, projected)) if old != new)
        return Moved(changed, sources, tuple(conflicts)) if changed or conflicts else None

    def _room(self, edge: Edge, t: int, f: int, projected: list[dict[int, Axes]], sharding: Sharding) -> list[Axis]:
        """Axes that factor `f` of tensor `t` may not take: used by its other factors, or to stay replicated."""
        taken = [axis for g, axes in projected[t].items() if g != f for axis in axes]
        taken.extend(sharding.replicated)
        taken.extend(self.reserved.get(edge.tensors[t], ()))
        return taken

    def _basic(
        self, edge: Edge, projected: list[dict[int, Axes]], shardings: list[Sharding], factors: list[int],
        backward_only: bool, sources: dict[tuple[int, int], int],
    ) -> None:  # fmt: skip
        """Per factor the longest list of major axes that all tensors agree on; any conflict truncates it."""
        count = len(edge.rule.operands)
        offered: dict[int, tuple[Axes, int]] = {}
        for f in factors:
            have = [t for t, p in enumerate(projected) if f in p]
            if not have:
                continue
            agreed, source, bounded = projected[have[0]][f], have[0], False
            for t in have[1:]:
                mine = projected[t][f]
                if mine == agreed:
                    continue
                shared = common_prefix(agreed, mine)
                if shared == mine:
                    continue
                if shared == agreed and not bounded:
                    agreed, source = mine, t
                elif shared != agreed:
                    agreed, bounded = shared, True
            if agreed and any(projected[t][f] != agreed for t in have):
                offered[f] = (agreed, source)
        start = {f: axes for f, (axes, _) in offered.items()}
        for f, (agreed, source) in offered.items():
            have = [t for t, p in enumerate(projected) if f in p]
            for t in have if len(start) > 1 else ():  # what two factors of one tensor want goes to neither
                rivals = [a for g in projected[t] if g != f for a in start.get(g, ())]
                if rivals:
                    agreed = limit(agreed, projected[t][f], rivals)
            for t in have:
                if projected[t][f] != agreed:
                    agreed = limit(agreed, projected[t][f], self._room(edge, t, f, projected, shardings[t]))
            for t in have:
                mine = projected[t][f]
                if backward_only and t >= count:
                    continue
                if edge.pointwise and t < count and self._closed(edge, count, f, shardings):
                    continue  # an operand is never sharded more than its result
                if len(agreed) and agreed != mine and starts_with(agreed, mine):
                    self._take(edge, t, f, projected, shardings, agreed, source, sources)

    def _closed(self, edge: Edge, t: int, f: int, shardings: list[Sharding]) -> bool:
        """Whether a tensor keeps the dim of a factor as it is."""
        return any(f in members and not shardings[t].open[d] for d, members in enumerate(edge.rule.tensors[t]))

    def _aggressive(
        self, edge: Edge, projected: list[dict[int, Axes]], shardings: list[Sharding], factors: list[int],
        backward_only: bool, sources: dict[tuple[int, int], int], conflicts: list[tuple[int, Axes, Axes]],
    ) -> None:  # fmt: skip
        """Resolves conflicts: the largest source wins, results are served before operands."""
        count = len(edge.rule.operands)
        offers = [
            (t, f) for f in factors for t in range(len(projected)) if projected[t].get(f)
        ]  # fmt: skip
        offers.sort(
            key=lambda o: (
                -(size_of(projected[o[0]][o[1]]) if edge.pointwise else 0),
                -edge.tensors[o[0]].numel,
                o[0] < count,
                o[0],
                o[1],
            )
        )
        order = [*range(count, len(projected)), *range(count)]
        for source, f in offers:
            axes = projected[source][f]
            for t in order:
                if t == source or f not in projected[t] or (backward_only and t >= count):
                    continue
                mine = projected[t][f]
                if axes == mine or not starts_with(axes, mine):
                    continue
                room = self._room(edge, t, f, projected, shardings[t])
                wanted = limit(axes, mine, room)
                if wanted != axes:
                    conflicts.append((t, remainder(axes, wanted), tuple(room)))
                if edge.pointwise and t < count:  # an operand is never sharded more than its result
                    result = projected[count].get(f, ())
                    wanted = common_prefix(wanted, result) if result else mine
                if wanted != mine and starts_with(wanted, mine):
                    self._take(edge, t, f, projected, shardings, wanted, source, sources)

    def _take(
        self, edge: Edge, t: int, f: int, projected: list[dict[int, Axes]], shardings: list[Sharding], axes: Axes,
        source: int, sources: dict[tuple[int, int], int],
    ) -> None:  # fmt: skip
        """Gives factor `f` of tensor `t` these axes, as far as its dim is open and the factor is filled evenly."""
        dim = next(d for d, fs in enumerate(edge.rule.tensors[t]) if f in fs)
        if not shardings[t].open[dim]:
            return
        size = edge.rule.sizes[f]
        fitting: list[Axis] = []
        for axis in axes:
            have = size_of(fitting) * axis.size
            if size % have:
                part = divisor(axis, size // size_of(fitting))
                if part is not None:
                    fitting.append(part)
                break
            fitting.append(axis)
        wanted = merge(fitting)
        if wanted != projected[t][f] and starts_with(wanted, projected[t][f]):
            projected[t][f] = wanted
            sources[(t, f)] = source

    def _write_back(
        self, edge: Edge, t: int, sharding: Sharding, factors: dict[int, Axes], sources: dict[tuple[int, int], int],
        changed: list[Value],
    ) -> None:  # fmt: skip
        value = edge.tensors[t]
        for dim, members in enumerate(edge.rule.tensors[t]):
            if not sharding.open[dim] or not any((t, f) in sources for f in members):
                continue
            new = unproject(members, factors, edge.rule.sizes)
            old = self.state[value].dims[dim]
            if new == old or not starts_with(new, old):
                continue
            others = [a for d, axes in enumerate(self.state[value].dims) if d != dim for a in axes]
            if any(overlap(a, others) for a in remainder(new, old)):  # the same value is two operands of this op
                continue
            self._set(value, self.state[value].with_dim(dim, new))
            for f in members:
                if (t, f) not in sources:
                    continue
                source = sources[(t, f)]
                source_dim = next(d for d, fs in enumerate(edge.rule.tensors[source]) if f in fs)
                cause = Cause(_describe(edge.op), edge.tensors[source], source_dim)
                for axis in factors[f]:
                    if not overlap(axis, old):
                        self.causes.setdefault((value, dim), []).append((axis, cause))
            changed.append(value)


def _describe(op: Op | Tie) -> str:
    if isinstance(op, Tie):
        return "a sharding group (parameter, gradient and optimizer state)"
    target = getattr(op.target, "__name__", str(op.target))
    return f"{target} `{op.name}`" + (f" in {op.module}" if op.module else "")
