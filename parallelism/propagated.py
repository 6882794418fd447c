"""What propagation starts from and what it gives: annotations, and a sharding for every value, each with its cause."""

from __future__ import annotations

from dataclasses import dataclass, field

from tpshard.parallelism.graph import Graph, Op, Value
from tpshard.parallelism.mesh import Axes, Axis, Mesh
from tpshard.parallelism.rules.rule import Rule
from tpshard.parallelism.sharding import Sharding, show_axis


@dataclass(frozen=True)
class Annotation:
    """What the user wrote for one value: a sharding, and where."""

    sharding: Sharding
    where: str
    """`file:line:col  text`, or which argument of `partition` it is."""


@dataclass(frozen=True)
class Cause:
    """Why a dim got axes: they came from `source`'s dim through `op`, or from an annotation."""

    op: str
    source: Value | None
    source_dim: int
    where: str = ""


@dataclass(frozen=True)
class Conflict:
    """An axis that two tensors of one op wanted on different dims."""

    op: str
    value: Value
    axes: Axes
    lost_to: Axes

    @property
    def bytes(self) -> int:
        return self.value.bytes


@dataclass
class Shardings:
    """A sharding per value, with its reason."""

    mesh: Mesh
    graph: Graph
    of: dict[Value, Sharding]
    rules: dict[Op, Rule]
    causes: dict[tuple[Value, int], list[tuple[Axis, Cause]]]
    annotated: dict[Value, Annotation]
    conflicts: list[Conflict] = field(default_factory=list)

    def explain(self, value: Value) -> tuple[str, ...]:
        """A line per axis and step, each chain ending at an annotation."""
        lines: list[str] = []
        if value in self.annotated and self.annotated[value].where:
            lines.append(f"annotated {self.annotated[value].sharding.show(self.mesh)} at {self.annotated[value].where}")
        for dim in range(value.rank):
            for axis in self.of[value].dims[dim]:
                lines.extend(self.chain(value, dim, axis))
        return tuple(lines) or ("replicated: no annotation reaches it",)

    def chain(self, value: Value, dim: int, axis: Axis) -> list[str]:
        lines: list[str] = []
        seen = set()
        while (value, dim) not in seen:
            seen.add((value, dim))
            cause = self.cause(value, dim, axis)
            if cause is None:
                break
            here = f"{show_axis(axis, self.mesh)} on dim {dim} of {value.name}"
            if cause.source is None:
                lines.append(f"{here}: annotated at {cause.where}")
                break
            lines.append(f"{here}: from dim {cause.source_dim} of {cause.source.name} through {cause.op}")
            value, dim = cause.source, cause.source_dim
        return lines

    def cause(self, value: Value, dim: int, axis: Axis) -> Cause | None:
        for known, cause in self.causes.get((value, dim), ()):
            if known.overlaps(axis):
                return cause
        return None

    def root(self, value: Value, dim: int, axis: Axis) -> str:
        """Where the annotation behind an axis was written."""
        for _ in range(10_000):
            cause = self.cause(value, dim, axis)
            if cause is None:
                return ""
            if cause.source is None:
                return cause.where
            value, dim = cause.source, cause.source_dim
        return ""
