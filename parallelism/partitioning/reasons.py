"""Looks up, in a propagated graph, why a value has its sharding, and why a collective exists.

The reason of a collective is the operation, the value, both layouts and the annotation behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from tpshard.parallelism.anchors import is_anchor, is_boundary, is_named, is_split
from tpshard.parallelism.depth import Depth
from tpshard.parallelism.graph import Op, Role, Value
from tpshard.parallelism.mesh import Axis, overlap
from tpshard.parallelism.partitioning.repeated import Work
from tpshard.parallelism.propagated import Shardings
from tpshard.parallelism.resharding.reshard import ReshardStep
from tpshard.parallelism.rules.table import entry_of
from tpshard.parallelism.why import Demand, LastStep, ShardingReason, SourcePlace, through

FAR = 8
"""The number of producers that `any_root` searches for the origin of an axis of a partial sum."""


class Reasons:
    """Looks up the reasons of collectives in the causes that propagation recorded."""

    def __init__(self, shardings: Shardings):
        self.s, self.mesh = shardings, shardings.mesh
        self.roots: dict[tuple[Value, int, str], tuple[tuple[SourcePlace, ...], bool]] = {}

    def why(self, value: Value, step: ReshardStep, reader: Op) -> dict[str, Any]:
        """The reason of a step that reshards `value` for `reader`, as keyword arguments of a `Collective`."""
        role, requested, mixes, cause = what_moves(value, reader), True, "", reader
        kind: Literal["sum", "given", "storage", "operand"]
        if step.kind in ("reduce", "scatter"):
            kind, cause = ("given", reader) if value.producer is None else ("sum", value.producer)
        elif is_boundary(reader):
            kind = "storage"
        else:
            kind, requested = "operand", is_anchor(reader) or _of_attention(value, step, reader)
            mixing = entry_of(reader.target).mixes
            mixes = reader.operands[mixing].name if mixing is not None else ""
        axis, written_at = "", tuple[SourcePlace, ...]()
        for moved, source, _ in step.parts:
            requested = requested or self.asked_on_the_way(value, reader, moved)
            requested = requested or self.asked_by_experts(value, reader, moved)
            written_at, annotated = self.root(value, source, moved)
            if not written_at:
                written_at, annotated = self.any_root(value, moved)
            if written_at:
                axis = moved.name
                requested = requested or annotated
                break
        before, after = (layout.notation(self.mesh, value.dims) for layout in (step.before, step.after))
        demand = Demand(kind, through(cause), value.name, before, after, mixes, axis, written_at)
        name = reader.args[2] if role in ("parameter", "gradient") else value.name
        return {"why": (demand,), "value": (name,), "of": role, "requested": requested}

    def asked_on_the_way(self, value: Value, reader: Op, axis: Axis) -> bool:
        """Returns whether an activation's annotation shards a named view from a value to its reader over the axis."""
        return any(
            is_named(one.producer) and overlap(axis, axes) and self.root(one, dim, axis)[1]  # type: ignore[arg-type]
            for operand in reader.operands
            for one in views_between(value, operand) or ()
            for dim, axes in enumerate(self.s.of[one].dims)
        )

    def asked_by_experts(self, value: Value, reader: Op, axis: Axis) -> bool:
        """Returns whether experts sharded over the axis read a value, or a view of it, as their tokens or routing."""
        matrices = entry_of(reader.target).routed
        return (
            matrices > 0
            and any(views_between(value, operand) is not None for operand in reader.operands[:-matrices])
            and any(overlap(axis, axes) for one in reader.operands[-matrices:] for axes in self.s.of[one].dims)
        )

    def root(self, value: Value, dim: int, axis: Axis) -> tuple[tuple[SourcePlace, ...], bool]:
        """Finds the annotation that made propagation shard a dim over an axis, and whether it is an activation's.

        An annotation of an activation asks for reshards towards it; one of a parameter does not. Answers are
        cached for all dims on the way.
        """
        trail = []
        answer: tuple[tuple[SourcePlace, ...], bool] = ((), False)
        while dim >= 0:
            key = (value, dim, axis.name)
            if key in self.roots:
                answer = self.roots[key]
                break
            trail.append(key)
            self.roots[key] = ((), False)
            cause = self.s.cause(value, dim, axis)
            if cause is None:
                break
            if cause.source is None:
                maker = value.producer
                activation = maker is not None and (is_named(maker) or is_split(maker))
                answer = (cause.written_at, activation)
                break
            value, dim = cause.source, cause.source_dim
        for key in trail:
            self.roots[key] = answer
        return answer

    def any_root(self, value: Value, axis: Axis) -> tuple[tuple[SourcePlace, ...], bool]:
        """The annotation that an axis of a value comes from, found by going back through its producers."""
        producer = value.producer
        for _ in range(FAR):
            if producer is None:
                return (), False
            for operand in producer.operands:
                for dim in range(operand.rank):
                    if overlap(axis, self.s.of[operand].dims[dim]):
                        root = self.root(operand, dim, axis)
                        if root[0]:
                            return root
            producer = producer.operands[0].producer if producer.operands else None
        return (), False


def _of_attention(value: Value, step: ReshardStep, reader: Op) -> bool:
    """Whether a step exchanges a sharded sequence for sharded heads before attention, or back behind it, or gathers the
    sequence of keys, values or documents' ids.

    Whoever shards the sequence asks for one of the ways to attend to all of it; see `rules.sequence`.
    """
    before, behind = (op is not None and _attends(op) for op in (reader, value.producer))
    if step.kind == "gather" and before:
        length = 3 - entry_of(reader.target).heads_dim if value.rank == 4 else 1
        return all(source == length for _, source, _ in step.parts)
    return step.kind == "exchange" and (before or behind)


def _attends(op: Op) -> bool:
    return entry_of(op.target).work in ("attention", "attention_backward")


def views_between(value: Value, operand: Value) -> list[Value] | None:
    """The values from an operand, included, back to a value, excluded; None if the operand is not a view of it."""
    between: list[Value] = []
    while operand is not value:
        if operand.producer is None or len(operand.producer.operands) != 1:
            return None
        between.append(operand)
        operand = operand.producer.operands[0]
    return between


def what_moves(value: Value, reader: Op) -> Role:
    """The role of a value that is resharded: parameter or gradient at a boundary, else logits, loss, scalar,
    optimizer (computed in an update) or activation."""
    if is_boundary(reader):
        return "gradient" if reader.args[1] == "gradient" else "parameter"
    if value.role in ("logits", "loss"):
        return value.role
    if value.rank == 0:
        return "scalar"
    updating = value.producer is not None and value.producer.place.phase == "update"
    return "optimizer" if updating else "activation"


@dataclass(frozen=True, eq=False)
class PropagatedReasons:
    """Looks up why a named value is sharded, in a propagated graph or (with `depth`) the deep model of it."""

    shardings: Shardings
    work: Work | None = None
    """The work from which warnings of a deep model are computed."""
    depth: Depth | None = None
    propagated: Shardings | None = None
    """The shardings before `joined_slices` rewrote their graph."""

    @cached_property
    def _values(self) -> dict[str, Value]:
        # also of values that `joined_slices` took out of the graph: reasons of others pass through them
        return {value.name: value for value in (*self.shardings.of, *self.shardings.graph.values())}

    def __call__(self, name: str) -> ShardingReason:
        value, by = self._stands_for(name)
        shardings, depth = self.shardings, self.depth
        annotation = shardings.annotated.get(value)
        shown, places = "", annotation.written_at if annotation is not None else ()
        if annotation is not None and places:
            shown = annotation.sharding.notation(shardings.mesh, value.dims)
        steps = []
        for dim in range(value.rank):
            for axis, cause in shardings.causes.get((value, dim), ()):
                op, source = cause.op, cause.source.name if cause.source is not None else ""
                if depth is not None:
                    op, source = op and depth.through(op, by), depth.shift_name(source, by)
                steps.append(LastStep(dim, axis, op, source, cause.source_dim, cause.written_at))
        return ShardingReason(tuple(shardings.of[value].dims), shown, places, tuple(steps))

    def _stands_for(self, name: str) -> tuple[Value, int | None]:
        """The graph's value that stands for a name, and by how many layers to shift it; None outside of layers."""
        layer = None if self.depth is None else self.depth.layer(name)
        if self.depth is None or layer is None:
            return self._values[name], None
        by = layer - self.depth.shallow(layer)
        return self._values[self.depth.shift_name(name, -by)], by
