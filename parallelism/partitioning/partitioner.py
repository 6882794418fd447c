"""The partitioner: turns a graph and its shardings into one device's `Program`, with all its collectives.

Each op is computed in one sharding of its factors, which all its operands and results share. Operands are resharded to
it, once per value and layout. A partial sum may stay unreduced until a later op (`partial_sums`). (GSPMD, section 4.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx
from tpshard.parallelism.anchors import is_anchor, is_boundary, output
from tpshard.parallelism.factors import Cut
from tpshard.parallelism.graph import Graph, Op, Place, Ref, Value
from tpshard.parallelism.mesh import Axes, difference, size_of, union, without
from tpshard.parallelism.partitioning import crossing
from tpshard.parallelism.partitioning.choose import (
    Choice,
    choice_for,
    choose,
    computable,
    layout_of,
    past_padding,
    with_grains,
)
from tpshard.parallelism.partitioning.crossing import Border, Inside
from tpshard.parallelism.partitioning.detours import detours
from tpshard.parallelism.partitioning.local import LocalPart
from tpshard.parallelism.partitioning.partial_sums import carried_sums
from tpshard.parallelism.partitioning.reasons import PropagatedReasons, Reasons
from tpshard.parallelism.partitioning.repeated import Work
from tpshard.parallelism.partitioning.shard_padding import ShardPadding
from tpshard.parallelism.program import INFO, Info, Port, Program, Spec, ValueRecord
from tpshard.parallelism.propagated import Shardings
from tpshard.parallelism.resharding.lower import Emitter
from tpshard.parallelism.resharding.reshard import LATENCY_BYTES, cost, redistribution
from tpshard.parallelism.rules.control_flow import CONTROL_FLOW, bodies, cond, every_graph, rounds
from tpshard.parallelism.rules.table import entry_of
from tpshard.parallelism.sharding import Layout, even, local_shape, replicated
from tpshard.parallelism.tracing import joined_slices


def mark_outputs(graph: Graph, names: Mapping[int, str] | None = None) -> None:
    """Appends an identity op (`anchors.output`) behind every result of the function, to which its annotation belongs.

    Result i is named `names[i]`, or `return[i]` without a name.
    """
    marked: list[Value | Any] = []
    for i, out in enumerate(graph.outputs):
        if not isinstance(out, Value):
            marked.append(out)
            continue
        phase = out.producer.phase if out.producer is not None else "forward"
        name = (names or {}).get(i, f"return[{i}]")
        op = Op(name, output, (Ref(0),), {}, [out], [], Place(phase=phase))
        op.results = [Value(name, out.shape, out.dtype, op)]
        graph.ops.append(op)
        marked.append(op.results[0])
    graph.outputs = marked
    graph.refresh_users()


def partition_graph(shardings: Shardings, latency: int = LATENCY_BYTES, apart: Sequence[str] = ()) -> Program:
    """Partitions a propagated graph, and simplifies it (`joined_slices`), into the program of one device.

    latency: the cost of starting a collective, in bytes. apart: mesh axes along which devices will run different parts
    of the program.
    """
    program = _Partitioner(joined_slices.join(shardings), latency, apart).run()
    assert isinstance(program.reasons, PropagatedReasons)
    return replace(program, reasons=replace(program.reasons, propagated=shardings))


class _Partitioner:
    """Chooses the sharding of every op, then emits the program op by op."""

    def __init__(
        self, shardings: Shardings, latency: int, apart: Sequence[str], outer: Op | None = None,
        border: Border | None = None,
    ):  # fmt: skip
        """outer, border: of a body of control flow, the operation, and the layouts of its inputs and results."""
        self.latency, self.apart, self.outer, self.border = latency, apart, outer, border
        self.s, self.graph, self.mesh = shardings, shardings.graph, shardings.mesh
        self.emitter = Emitter(self.mesh)
        self.copies: dict[Value, dict[Layout, fx.Node]] = {}
        self.home: dict[Value, Layout] = {}
        self.choices: dict[Op, Choice] = {}
        graphs = list(every_graph(self.graph))  # a body's own: there are many, of few operations
        self.rules = {op: rule for each in graphs for op in each.ops if (rule := shardings.rules.get(op)) is not None}
        """The rule by which each op is computed: the chosen one, once an alternative has been chosen."""
        self.warnings: list[str] = []
        self.reasons = Reasons(shardings)
        self.fetched: dict[Value, set[Layout]] = {}
        """The layouts to which products with parameters reshard each value."""
        self.sharers: dict[Value, dict[Layout, set[Op]]] = {}
        """The ops that reshard each value to a layout."""
        self.computed: dict[Value, Layout] = {}
        """The layout in which each value is computed, before it is resharded."""
        self.partial: dict[Value, Axes] = {}
        """Values that are partial sums when their op computes them, with the axes."""
        self.left_partial: dict[Value, Axes] = {}
        """Values that stay partial until a later op or anchor, with the axes."""
        self.padding = ShardPadding(self.emitter)
        outputs = [op for op in self.graph.ops if op.target is output]
        self.summed_gradients = {op.operands[0] for op in outputs if op.results[0].role == "gradient"}
        """Gradient results: their padding is set to 0, since later programs sum their squares, padding included."""
        self.propagated = {v: Layout(shardings.of[v].dims) for each in graphs for v in each.values()}
        self.unreduced = {v: axes for v in self.graph.inputs if (axes := self.s.of[v].unreduced)}
        if border is not None:
            ends = (*zip(self.graph.outputs, border.results), *zip(self.graph.inputs, border.inputs))
            self.propagated.update({value: layout.whole() for value, layout in ends})
            self.unreduced = {value: layout.partial for value, layout in ends if layout.partial}
        self.sums: dict[Op, dict[int, Axes]] = {}
        """The results of control flow that bodies leave partial, with the axes, by their index."""
        self.settled: dict[Op, Choice] = {}
        """How control flow is computed, which is decided once: it depends on what propagation found inside alone."""
        self.records: dict[str, ValueRecord] = {}
        """Those of values in bodies."""
        self.flops: Counter[str] = Counter()
        """The FLOPs of a device by the operation of the global graph."""

    # ---- deciding: factor shardings of ops, and which sums stay partial ---------------------------------------
    def decide(self) -> None:
        """Chooses the factor sharding of every op, and then which partial sums stay unreduced.

        Two passes over the ops, in forward order, choose their shardings. The first one records which ops reshard a
        value, and to which layouts. Then detours are removed. In the second pass, ops that reshard a value to the same
        layout share the cost, and a layout to which a product with a parameter reshards a value is free for others.
        """
        self._choose_all(first=True)
        found = detours(self.graph, self.rules, self.choices, self.propagated, self.computed, self.s.annotated)
        self.propagated |= found.layouts
        for value, by_layout in found.sharers.items():
            for layout, ops in by_layout.items():
                self.sharers.setdefault(value, {}).setdefault(layout, set()).update(ops)
        natural = self._choose_all(first=False)
        self.partial, self.left_partial = carried_sums(self.graph, self.rules, natural, self.unreduced)

    def _is_fixed(self, value: Value, reader: Op) -> bool:
        """Whether a value is a used parameter (of experts also its view), whose layout should not change."""
        routed = entry_of(reader.target).routed
        while routed and (op := value.producer) and entry_of(op.target).view and not is_boundary(op):
            value = op.operands[0]
        return value.producer is not None and is_boundary(value.producer) and value.producer.args[1] == "parameter"

    def _choose_all(self, first: bool) -> dict[Value, tuple[Axes, str]]:
        self.home |= {value: self.propagated[value] for value in self.graph.inputs}
        self.home |= {value: replicated(value.rank) for value, _ in self.graph.constants.values()}
        natural: dict[Value, tuple[Axes, str]] = {
            v: (self.unreduced[v], "sum") for v in self.graph.inputs if v in self.unreduced
        }
        for op in self.graph.ops:
            if is_anchor(op):
                self.home[op.results[0]] = self._anchor_layout(op)
                continue
            homes = [self.home[v] for v in op.operands]
            fixed = [self._is_fixed(v, op) for v in op.operands]
            # a layout to which a product with a parameter reshards the value costs nothing more
            fetched = [() if first else self.fetched.get(v, ()) for v in op.operands]
            targets = [self.propagated[r] for r in op.results]
            sharers = [] if first else [self.sharers.get(v, {}) for v in op.operands]
            if op.target in CONTROL_FLOW:
                rule = self.s.rules[op]
                if op not in self.settled:
                    self.settled[op] = self._settle(op)
                choice = self.settled[op]
            else:
                rule, choice = choose(op, self.s.rules[op], homes, targets, fixed, fetched, sharers, self.latency)
            self.rules[op] = rule
            for value, dims in zip(op.operands, rule.operands) if first else ():
                needed_layout = layout_of(rule, dims, choice, False)
                if needed_layout != self.home[value]:
                    self.sharers.setdefault(value, {}).setdefault(needed_layout, set()).add(op)
                    if any(fixed):
                        self.fetched.setdefault(value, set()).add(needed_layout)
            self.choices[op] = choice
            for i, (result, dims) in enumerate(zip(op.results, rule.results)):
                computed = layout_of(rule, dims, choice, True)
                computed = self.computed[result] = computed.as_sum(self.sums[op][i]) if self._sums(op, i) else computed
                if computed.partial:
                    natural[result] = (computed.partial, computed.kind)
                    self.home[result] = self._layout_after_sum(result, computed)
                else:
                    self.home[result] = self._pinned_layout(result) or computed
        return natural

    def _pinned_layout(self, value: Value) -> Layout | None:
        """Returns the layout of a value whose annotation is closed in every dim; None without such an annotation."""
        if value not in self.s.annotated or any(self.s.annotated[value].sharding.open) or not value.rank:
            return None
        return self.propagated[value]

    def _anchor_layout(self, op: Op) -> Layout:
        """Returns the layout of an anchor's result: its annotation's, or else its operand's or the propagated one."""
        value = op.results[0]
        sharding = self.s.of[value]
        if value in self.s.annotated or is_boundary(op):
            return Layout(sharding.dims, sharding.unreduced)
        if op.target is output:
            return self.home[op.operands[0]].whole()
        return with_grains(value.shape, self.propagated[value], self.home[op.operands[0]])

    def _layout_after_sum(self, value: Value, computed: Layout) -> Layout:
        """The layout of a partial value after its reduction: the propagated one, without losing its own axes."""
        reduced_layout = with_grains(value.shape, self.propagated[value], computed)
        return reduced_layout if any(reduced_layout.dims) or not any(computed.dims) else computed.whole()

    # ---- emitting -------------------------------------------------------------------------------------------
    def run(self) -> Program:
        self.decide()
        for value in self.graph.inputs:
            layout = self.home[value].as_sum(self.unreduced.get(value, ()))
            node = self.emitter.input(value.name, local_shape(value.shape, layout), value.dtype)
            self.padding.zeros[node] = frozenset(range(value.rank)) if self.outer is None else frozenset()
            self.copies[value] = {layout: node}
            self.home[value] = layout
        for name, (value, _) in self.graph.constants.items():
            node = self.emitter.graph.get_attr(name)
            node.meta[INFO] = Info((Spec(value.shape, value.dtype),), origin=name)
            self.copies[value] = {self.home[value]: node}
        for op in self.graph.ops:
            if is_anchor(op):
                target = self._anchor_layout(op)
                self.copies[op.results[0]] = {target: self.get(op.operands[0], target, op)}
                self.home[op.results[0]] = target
            else:
                self.emit(op)
        return self.finish()

    def emit(self, op: Op) -> None:
        rule, choice = self.rules[op], self.choices[op]
        carried: Axes = ()
        if rule.additive and len(op.results) == 1 and op.results[0] in self.partial:
            own = layout_of(rule, rule.results[0], choice, True).partial
            carried = difference(self.partial[op.results[0]], own)
            # a partial sum is whole over its axes, so they cannot also shard a dim of it
            choice = {f: Cut(rest, cut.grain) for f, cut in choice.items() if (rest := without(cut.axes, carried))}
            choice = computable(op, rule, choice)
        else:
            op, rule = past_padding(op, rule, choice, self.rules)
        inputs = []
        for i, (value, dims) in enumerate(zip(op.operands, rule.operands)):
            needed_layout = layout_of(rule, dims, choice, False)
            if carried and i in rule.additive:
                needed_layout = needed_layout.as_sum(carried)
            if op.target is not cond and self._sums(op, i):
                needed_layout = needed_layout.as_sum(self._sums(op, i))
            inputs.append(self.padding.fill(self.get(value, needed_layout, op), op, rule, choice, i, needed_layout))
        self._at(op, op.results[0])
        local = LocalPart(self.emitter, op, rule, choice, inputs)
        nodes = self._emit_bodies(local) if op.target in CONTROL_FLOW else self._emit_local(local)
        if not rule.has_rule and size_of(a for v in op.operands for a in self.home[v].axes) > 1:
            self.warnings.append(f"`{op.name}` ({op.target}) has no rule: its operands are gathered whole")
        for i, (result, dims, node) in enumerate(zip(op.results, rule.results, nodes)):
            layout = layout_of(rule, dims, choice, True)
            if carried or self._sums(op, i):
                layout = layout.as_sum(union(layout.partial, carried, self._sums(op, i)))
            self.padding.note_result(node, op, rule, inputs, i, layout)
            if result in self.summed_gradients:
                node = self.padding.clear(node, result, layout)
            self.copies[result] = {layout: node}
            self.home[result] = layout
            if layout.partial and result not in self.left_partial:
                target = self._layout_after_sum(result, layout)
                self.get(result, target, op)
                del self.copies[result][layout]
                self.home[result] = target
            elif (pinned := self._pinned_layout(result)) is not None and pinned != layout and not layout.partial:
                self.get(result, pinned, op)
                self.home[result] = pinned

    def _at(self, op: Op, value: Value) -> None:
        """Sets the origin of the following nodes to `op` and `value`."""
        self.emitter.at(op.name, op.place._replace(role=value.role))

    def get(self, value: Value, layout: Layout, reader: Op) -> fx.Node:
        """The node with `value` in `layout`; emits the cheapest resharding from an existing copy, once per layout."""
        copies = self.copies[value]
        if layout not in copies and (view := self._as_view(value, layout, reader)) is not None:
            copies[layout] = view
        if layout in copies:
            return copies[layout]
        size = value.dtype.itemsize
        latency = 0 if is_boundary(reader) else self.latency
        source, steps = min(
            (
                (held_layout, redistribution(value.shape, held_layout, layout, size, latency))
                for held_layout in copies
                if not (held_layout.partial and len(copies) > 1)
            ),
            key=lambda pair: cost(pair[1], value.shape, size, latency),
        )
        node = copies[source]
        self._at(reader, value)
        for step in steps:
            zeros = self.padding.zeros.get(node, frozenset())
            node = self.emitter.step(node, step, value.shape, **self.reasons.why(value, step, reader))
            # a step that divides anew pads with 0; padding that existed before stays as it was
            before = (even(n // step.grain(d), step.before.dims[d]) for d, n in enumerate(value.shape))
            anew = {d for _, d, _ in step.parts if step.kind == "regrain"}
            self.padding.zeros[node] = frozenset(d for d, clean in enumerate(before) if clean or d in zeros) - anew
        copies[layout] = node
        return node

    def _as_view(self, value: Value, layout: Layout, reader: Op) -> fx.Node | None:
        """Returns a value in a layout, as a view of its resharded source; None where that is not possible.

        The source is resharded once for all its views.
        """
        op = value.producer
        if op is None or len(op.operands) != 1 or entry_of(op.target).view is None or layout.partial:
            return None
        rule, (source,) = self.rules[op], op.operands
        choice = choice_for(op, rule, value.index, layout)
        if choice is None or source.numel > value.numel:
            return None
        source_layout = layout_of(rule, rule.operands[0], choice, False)
        if all(held_layout.partial for held_layout in self.copies[source]):
            return None
        node = self.get(source, source_layout, reader)
        (view,) = self._emit_local(LocalPart(self.emitter, op, rule, choice, [node]))
        self.padding.note_result(view, op, rule, [node], 0, layout)
        return view

    def _emit_bodies(self, local: LocalPart) -> list[fx.Node]:
        """Emits an operation of control flow, whose bodies are programs of their own."""
        op, programs = local.op, []
        times = rounds(op.target, op.args, [v.shape for v in op.operands])
        borders = crossing.borders_of(op, local.rule, local.choice, self.sums[op])
        for graph, border in zip(bodies(op.args, Graph), borders):
            part = _Partitioner(replace(self.s, graph=graph), self.latency, self.apart, op, border)
            programs.append(part.run())
            self.warnings += part.warnings
            self.rules.update(part.rules)
            self.choices.update(part.choices)
            self.flops.update({name: times * flops for name, flops in part.flops.items()})
            self.records |= part.records
        return local.with_bodies(programs, *crossing.work_of(op, programs))

    def _sums(self, op: Op, result: int) -> Axes:
        """The axes over which a result of control flow stays partial; none of other ops."""
        return self.sums.get(op, {}).get(result, ())

    def _settle(self, op: Op) -> Choice:
        """Decides how control flow is computed: the cuts of what crosses a body's border, and what stays partial."""
        rule = self.s.rules[op]
        choice = crossing.crossing_choice(op, rule, self.propagated)
        inside = Inside({}, {}, {})
        for graph, border in zip(bodies(op.args, Graph), crossing.borders_of(op, rule, choice, {})):
            part = _Partitioner(replace(self.s, graph=graph), self.latency, self.apart, op, border)
            part.decide()
            inside.computed.update(part.computed)
            inside.partial.update(part.partial)
            inside.needed.update(crossing.needed_layouts(graph, part.rules, part.choices))
        choice, self.sums[op] = crossing.settled(op, rule, choice, inside)
        return choice

    def _emit_local(self, local: LocalPart) -> list[fx.Node]:
        nodes = local.rule.local(local) if local.rule.local is not None else local.same()
        return nodes if isinstance(nodes, list) else [nodes]

    def finish(self) -> Program:
        results: list[Any] = []
        ports = []
        for i, out in enumerate(self.graph.outputs):
            if isinstance(out, Value):
                layout = self.home[out] if self.border is None else self.border.results[i]
                ports.append(self._port(out, layout))
                out = self.copies[out][layout] if self.outer is None else self.get(out, layout, self.outer)
            results.append(out)
        node = self.emitter.graph.output(tuple(results))
        node.meta[INFO] = Info(())
        _drop_dead(self.emitter.graph)
        for node in self.emitter.graph.nodes:
            self.flops[node.meta[INFO].origin] += node.meta[INFO].flops if node.target not in CONTROL_FLOW else 0
        work = Work(self.graph, self.mesh, self.rules, self.choices, +self.flops, self.apart)
        self.warnings += work.warnings() if self.outer is None else []
        self.records |= {v.name: self._record(v) for v in self.graph.values()}
        return Program(
            self.mesh, self.emitter.graph, tuple(self._port(v, self.home[v]) for v in self.graph.inputs), tuple(ports),
            self.records,
            constants={name: tensor for name, (_, tensor) in self.graph.constants.items()},
            warnings=list(dict.fromkeys(self.warnings)), in_tree=self.graph.in_tree, out_tree=self.graph.out_tree,
            reasons=PropagatedReasons(self.s, work),
        )  # fmt: skip

    def _record(self, value: Value) -> ValueRecord:
        op = value.producer
        own = value.name if self.outer is None else ""
        label = own if op is None else op.args[2] if is_boundary(op) else value.label
        annotated = value in self.s.annotated and self.s.is_annotated(value)
        layout = self.home.get(value, self.propagated[value])
        return ValueRecord(value.name, value.shape, value.dtype, layout, annotated, value.role, label, value.dims)

    def _port(self, value: Value, layout: Layout) -> Port:
        return Port(value.name, value.shape, value.dtype, layout, value.role or "tensor")


def _drop_dead(graph: fx.Graph) -> None:
    """Removes unread nodes, collectives included, in the same way on every rank."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
