"""The input and output of propagation: annotations, and a sharding for every value with its cause."""

from __future__ import annotations

from dataclasses import dataclass, field

from tpshard.parallelism.graph import Graph, Op, Value
from tpshard.parallelism.mesh import Axes, Axis, Mesh
from tpshard.parallelism.rules.rule import Rule
from tpshard.parallelism.sharding import Sharding, show_axis
from tpshard.parallelism.why import Explanation, Hop, Through, Told


@dataclass(frozen=True)
class Annotation:
    """The user's annotation of one value: a sharding, and where it was written."""

    sharding: Sharding
    told: tuple[Told, ...] = ()
    """The sources of the annotation; empty if it only excludes axes."""


@dataclass(frozen=True)
class Cause:
    """Why a dim has axes: they came from `source`'s dim through `op`, or from an annotation."""

    op: Through | None
    source: Value | None
    source_dim: int
    told: tuple[Told, ...] = ()


@dataclass(frozen=True)
class Conflict:
    """An axis that two tensors of one op need on different dims."""

    op: str
    value: Value
    axes: Axes
    lost_to: Axes

    @property
    def bytes(self) -> int:
        return self.value.bytes


@dataclass
class Shardings:
    """The sharding of every value, with its reason."""

    mesh: Mesh
    graph: Graph
    of: dict[Value, Sharding]
    rules: dict[Op, Rule]
    causes: dict[tuple[Value, int], list[tuple[Axis, Cause]]]
    annotated: dict[Value, Annotation]
    conflicts: list[Conflict] = field(default_factory=list)

    def explain(self, value: Value) -> Explanation:
        """The reasons of a value's sharding: one chain per axis, each ending at an annotation."""
        given = self.annotated.get(value)
        annotated = given.sharding.notation(self.mesh, value.dims) if given is not None and given.told else ""
        links = [
            link for dim in range(value.rank) for axis in self.of[value].dims[dim]
            for link in self.chain(value, dim, axis)
        ]  # fmt: skip
        return Explanation(annotated, given.told if given is not None else (), tuple(links))

    def chain(self, value: Value, dim: int, axis: Axis) -> list[Hop]:
        links: list[Hop] = []
        seen = set()
        while (value, dim) not in seen:
            seen.add((value, dim))
            cause = self.cause(value, dim, axis)
            if cause is None:
                break
            source = cause.source.name if cause.source is not None else ""
            links.append(
                Hop(show_axis(axis, self.mesh), value.name, dim, cause.op, source, cause.source_dim, cause.told)
            )
            if cause.source is None:
                break
            value, dim = cause.source, cause.source_dim
        return links

    def told(self, value: Value) -> bool:
        """Whether an axis of a value was annotated for the value itself."""
        axes = ((dim, axis) for dim, axes in enumerate(self.of[value].dims) for axis in axes)
        causes = (self.cause(value, dim, axis) for dim, axis in axes)
        return any(cause is not None and cause.source is None for cause in causes)

    def cause(self, value: Value, dim: int, axis: Axis) -> Cause | None:
        for known, cause in self.causes.get((value, dim), ()):
            if known.overlaps(axis):
                return cause
        return None
