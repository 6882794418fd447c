"""The numbers of equal layers in a shallow model and in the deep one that it stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

from tpshard.parallelism.graph import Place
from tpshard.parallelism.node_info import Collective, Info
from tpshard.parallelism.why import Demand, Hop, Through

SHALLOW = 4
"""Layers of the shallow model: two ends, and two between them that are compared."""
COMPARED, REPEATED, LAST = 1, 2, 3
"""Layers of the shallow model: the second is compared with the third, which is repeated."""


@dataclass(frozen=True)
class Depth:
    """The deep model's number of layers, and names in it.

    A name in a layer begins with the stack and the layer's number: `layers.2.mlp.up.weight`.
    """

    stack: str
    layers: int

    @property
    def copies(self) -> int:
        """How often the repeated layer stands in the deep model."""
        return self.layers - SHALLOW + 1

    @cached_property
    def _numbered(self) -> re.Pattern[str]:
        return re.compile(rf"{re.escape(self.stack)}\.(\d+)(?=\.|$)")

    def layer(self, name: str) -> int | None:
        """The layer's number in a name; None outside of layers."""
        match = self._numbered.match(name)
        return None if match is None else int(match[1])

    def shallow(self, layer: int) -> int:
        """The layer of the shallow model that stands for one of the deep model."""
        if layer == self.layers - 1:
            return LAST
        return min(layer, REPEATED)

    def moved(self, name: str, by: int | None) -> str:
        """A name with its layer's number increased. None is for what stands outside of layers: its last one is last."""
        match = None if by == 0 else self._numbered.match(name)
        if match is None:
            return name
        if by is None:
            by = self.layers - 1 - LAST if int(match[1]) == LAST else 0
        return f"{self.stack}.{int(match[1]) + by}{name[match.end() :]}"

    def times(self, name: str) -> int:
        """How often the deep model has what has a name in the shallow one."""
        return self.copies if self.layer(name) == REPEATED else 1

    def in_text(self, text: str) -> str:
        """A text about the shallow model with the number of its last layer replaced."""
        return re.sub(rf"(?<=`{re.escape(self.stack)}\.){LAST}(?=[.`])", str(self.layers - 1), text)

    def place(self, place: Place, by: int | None) -> Place:
        layer = place.layer
        if by and layer is not None and layer.stack == self.stack:
            layer = layer._replace(number=layer.number + by)
        return place._replace(module=self.moved(place.module, by), layer=layer)

    def through(self, op: Through, by: int | None) -> Through:
        return op._replace(name=self.moved(op.name, by), module=self.moved(op.module, by))

    def hop(self, hop: Hop, by: int | None) -> Hop:
        op = None if hop.through is None else self.through(hop.through, by)
        return hop._replace(value=self.moved(hop.value, by), through=op, source=self.moved(hop.source, by))

    def info(self, info: Info, by: int | None) -> Info:
        """A node's metadata with all names moved by a number of layers."""
        if by == 0:
            return info
        comm = None if info.comm is None else self._collective(info.comm, by)
        return replace(info, origin=self.moved(info.origin, by), place=self.place(info.place, by), comm=comm)

    def _collective(self, comm: Collective, by: int | None) -> Collective:
        names = tuple(self.moved(name, by) for name in comm.value)
        return replace(comm, value=names, why=tuple(self._demand(demand, by) for demand in comm.why))

    def _demand(self, demand: Demand, by: int | None) -> Demand:
        return replace(
            demand, op=self.through(demand.op, by), value=self.moved(demand.value, by),
            mixes=self.moved(demand.mixes, by),
        )  # fmt: skip
