"""Recording why a collective exists: the operation, the value, both layouts, and the annotation behind them."""

from __future__ import annotations

from typing import Any, Literal

from tpshard.parallelism.anchors import is_anchor, is_boundary, is_named, is_split
from tpshard.parallelism.graph import Op, Role, Value
from tpshard.parallelism.mesh import Axis, overlap
from tpshard.parallelism.propagated import Shardings
from tpshard.parallelism.reshard import ReshardStep
from tpshard.parallelism.rules.table import entry_of
from tpshard.parallelism.why import Demand, Told, through

FAR = 8
"""How many producers to search for the origin of an axis that a partial sum no longer shows."""


class Reasons:
    """Answers from the causes that propagation recorded."""

    def __init__(self, shardings: Shardings):
        self.s, self.mesh = shardings, shardings.mesh
        self.roots: dict[tuple[Value, int, str], tuple[tuple[Told, ...], bool]] = {}

    def why(self, value: Value, step: ReshardStep, reader: Op) -> dict[str, Any]:
        """The reason of a resharding step that brings `value` to `reader`, as arguments of a `Collective`."""
        of, asked, mixes, by = what_moves(value, reader), True, "", reader
        kind: Literal["sum", "given", "storage", "operand"]
        if step.kind in ("reduce", "scatter"):
            kind, by = ("given", reader) if value.producer is None else ("sum", value.producer)
        elif is_boundary(reader):
            kind = "storage"
        else:
            kind, asked = "operand", is_anchor(reader)
            mixing = entry_of(reader.target).mixes
            mixes = reader.operands[mixing].name if mixing is not None else ""
        axis, told = "", tuple[Told, ...]()
        for moved, source, _ in step.parts:
            told, annotated = self.root(value, source, moved)
            if not told:
                told, annotated = self.any_root(value, moved)
            if told:
                axis = moved.name
                asked = asked or annotated
                break
        before, after = (layout.notation(self.mesh, value.dims) for layout in (step.before, step.after))
        need = Demand(kind, through(by), value.name, before, after, mixes, axis, told)
        name = reader.args[2] if of in ("parameter", "gradient") else value.name
        return {"why": (need,), "value": (name,), "of": of, "asked": asked}

    def root(self, value: Value, dim: int, axis: Axis) -> tuple[tuple[Told, ...], bool]:
        """(the annotation that an axis of a dim comes from, whether it was of an activation).

        An annotation of an activation asks for reshards towards it; one of a parameter does not. Memoized along the
        chain.
        """
        trail = []
        answer: tuple[tuple[Told, ...], bool] = ((), False)
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
                answer = (cause.told, activation)
                break
            value, dim = cause.source, cause.source_dim
        for key in trail:
            self.roots[key] = answer
        return answer

    def any_root(self, value: Value, axis: Axis) -> tuple[tuple[Told, ...], bool]:
        """The annotation behind an axis that reaches a value through its producer's operands."""
        producer = value.producer
        for _ in range(FAR):
            if producer is None:
                return (), False
            for operand in producer.operands:
                for dim in range(operand.rank):
                    if overlap(axis, self.s.of[operand].dims[dim]):
                        found = self.root(operand, dim, axis)
                        if found[0]:
                            return found
            producer = producer.operands[0].producer if producer.operands else None
        return (), False


def what_moves(value: Value, reader: Op) -> Role:
    """The role of the moved value: parameter or gradient at a boundary, else logits, loss, scalar or activation."""
    if is_boundary(reader):
        return "gradient" if reader.args[1] == "gradient" else "parameter"
    if value.role in ("logits", "loss"):
        return value.role
    return "scalar" if value.rank == 0 else "activation"
