"""The input and the output of propagation: annotations, and the sharding of every value with its causes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tpshard.parallelism.graph import Graph, Op, Value
from tpshard.parallelism.mesh import Axis, Mesh
from tpshard.parallelism.rules.rule import Rule
from tpshard.parallelism.sharding import Sharding
from tpshard.parallelism.why import SourcePlace, Through


@dataclass(frozen=True)
class Annotation:
    """An annotation of one value: a sharding, and where the user wrote it."""

    sharding: Sharding
    written_at: tuple[SourcePlace, ...] = ()
    """Empty if the annotation only excludes axes."""


@dataclass(frozen=True)
class Cause:
    """The origin of an axis of a dim: dim `source_dim` of `source`, through `op`; without these, an annotation."""

    op: Through | None
    source: Value | None
    source_dim: int
    written_at: tuple[SourcePlace, ...] = ()


@dataclass
class Shardings:
    """The result of propagation: the sharding of every value, with its causes."""

    mesh: Mesh
    graph: Graph
    of: dict[Value, Sharding]
    rules: dict[Op, Rule]
    causes: dict[tuple[Value, int], list[tuple[Axis, Cause]]]
    annotated: dict[Value, Annotation]

    def copy(self) -> Shardings:
        """The same shardings of a copy of the graph."""
        graph, copies, own = self.graph.copy()
        ops = {op: op for op in self.rules} | own  # bodies of control flow are shared: nothing rewrites them
        values = {value: value for value in self.of} | copies

        def moved(cause: Cause) -> Cause:
            return cause if cause.source is None else replace(cause, source=values[cause.source])

        return Shardings(
            self.mesh, graph,
            {values[value]: sharding for value, sharding in self.of.items()},
            {ops[op]: rule for op, rule in self.rules.items()},
            {
                (values[value], dim): [(axis, moved(cause)) for axis, cause in causes]
                for (value, dim), causes in self.causes.items()
            },
            {values[value]: annotation for value, annotation in self.annotated.items()},
        )  # fmt: skip

    def is_annotated(self, value: Value) -> bool:
        """Whether an axis of a value comes from the value's own annotation."""
        axes = ((dim, axis) for dim, axes in enumerate(self.of[value].dims) for axis in axes)
        causes = (self.cause(value, dim, axis) for dim, axis in axes)
        return any(cause is not None and cause.source is None for cause in causes)

    def cause(self, value: Value, dim: int, axis: Axis) -> Cause | None:
        """Why a dim of a value has an axis; None if it does not have it."""
        for cause_axis, cause in self.causes.get((value, dim), ()):
            if cause_axis.overlaps(axis):
                return cause
        return None
