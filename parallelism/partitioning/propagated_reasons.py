"""The reasons of a propagated graph's shardings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tpshard.parallelism.chains import LastStep, ShardingReason
from tpshard.parallelism.depth import Depth
from tpshard.parallelism.graph import Value
from tpshard.parallelism.partitioning.repeated import Work
from tpshard.parallelism.propagated import Shardings


@dataclass(frozen=True, eq=False)
class PropagatedReasons:
    """Looks up why a named value is sharded, in a propagated graph or (with `depth`) the deep model of it."""

    shardings: Shardings
    work: Work | None = None
    """The work from which warnings of a deep model are computed."""
    depth: Depth | None = None

    @cached_property
    def _values(self) -> dict[str, Value]:
        return {value.name: value for value in self.shardings.graph.values()}

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
