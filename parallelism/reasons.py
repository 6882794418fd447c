"""Why a collective is there: the operation, the value, both layouts, and the annotation behind them."""

from __future__ import annotations

from typing import Any

from tpshard.parallelism.anchors import is_anchor, is_boundary, is_named, is_split
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.mesh import Axis, overlap
from tpshard.parallelism.propagated import Shardings
from tpshard.parallelism.reshard import Step

FAR = 8
"""Producers to look behind for an axis that a partial sum no longer shows."""


class Reasons:
    """Answers from the causes that propagation recorded."""

    def __init__(self, shardings: Shardings):
        self.s, self.mesh = shardings, shardings.mesh
        self.roots: dict[tuple[Value, int, str], tuple[str, bool]] = {}

    def why(self, value: Value, step: Step, reader: Op) -> dict[str, Any]:
        """What a `Collective` records of a resharding step that brings `value` to `reader`."""
        of, asked = what_moves(value, reader), True
        what = f"{value.name} {step.before.show(self.mesh)} -> {step.after.show(self.mesh)}"
        if step.kind in ("reduce", "scatter"):
            producer = value.producer.name if value.producer is not None else "an input"
            text = f"`{producer}` sums over a sharded dim: {what}"
        elif is_boundary(reader):
            text = f"stored sharded, used whole by `{reader.module or reader.name}`: {what}"
        else:
            text = f"{self.s.rules[reader].because or f'`{reader.name}` needs it'}: {what}"
            asked = is_anchor(reader)
        for axis, source, _ in step.parts:
            root, annotated = self.root(value, source, axis)
            if not root:
                root, annotated = self.any_root(value, axis)
            if root:
                text += f"; {axis.name} from {root}"
                asked = asked or annotated
                break
        name = reader.args[2] if of in ("parameter", "gradient") else value.name
        return {"reason": text, "value": name, "of": of, "asked": asked}

    def root(self, value: Value, dim: int, axis: Axis) -> tuple[str, bool]:
        """Where the annotation behind an axis of a dim was written, and whether it is an activation's.

        Who annotates an activation asks for what brings it there; a parameter's annotation asks for no reshard.
        Memoized along the chain.
        """
        trail = []
        answer = ("", False)
        while dim >= 0:
            key = (value, dim, axis.name)
            if key in self.roots:
                answer = self.roots[key]
                break
            trail.append(key)
            self.roots[key] = ("", False)
            cause = self.s.cause(value, dim, axis)
            if cause is None:
                break
            if cause.source is None:
                maker = value.producer
                activation = maker is not None and (is_named(maker) or is_split(maker))
                answer = (cause.where, activation)
                break
            value, dim = cause.source, cause.source_dim
        for key in trail:
            self.roots[key] = answer
        return answer

    def any_root(self, value: Value, axis: Axis) -> tuple[str, bool]:
        """The annotation behind an axis that reaches a value through its producer's operands."""
        producer = value.producer
        for _ in range(FAR):
            if producer is None:
                return "", False
            for operand in producer.operands:
                for dim in range(operand.rank):
                    if overlap(axis, self.s.of[operand].dims[dim]):
                        found = self.root(operand, dim, axis)
                        if found[0]:
                            return found
            producer = producer.operands[0].producer if producer.operands else None
        return "", False


def what_moves(value: Value, reader: Op) -> str:
    """parameter, gradient, scalar or activation."""
    if is_boundary(reader):
        return "gradient" if reader.args[1] == "gradient" else "parameter"
    return "scalar" if value.rank == 0 else "activation"
