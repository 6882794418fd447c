"""Renaming between a deep model of equal layers and the shallow model that is planned in its place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tpshard.parallelism.graph import Place
from tpshard.parallelism.node_info import Collective, Info
from tpshard.parallelism.why import Demand, Through

COMPARED, REPEATED, LAST = 1, 2, 3
"""Blocks of the shallow model: the second is compared with the third, which is repeated. The first is 0."""


@dataclass(frozen=True)
class Depth:
    """The depth of a deep model, and the renumbering of layers in names from the shallow model that stands for it.

    A name in a layer begins with the stack and the layer's number: `layers.2.mlp.up.weight`. The shallow model has four
    blocks of layers: two ends, and two between them that are compared.
    """

    stack: str
    layers: int
    period: int = 1
    """Layers of a block. The last block also has the layers that are left over."""
    head: int = 0
    """Further layers of the first block, which may be unlike all others."""

    @staticmethod
    def of(stack: str, kinds: Sequence[int]) -> Depth | None:
        """The depth of layers of these kinds, which repeat in blocks, such as five with a sliding window and one
        without; None if they do not. The shallow model leaves out as many layers as possible."""
        best = None
        for period in range(1, len(kinds) // 4 + 1):
            unlike = [i for i in range(len(kinds) - period) if kinds[i] != kinds[i + period]]
            depth = Depth(stack, len(kinds), period, head=unlike[-1] + 1 if unlike else 0)
            if depth.copies > 1 and (best is None or depth.skipped > best.skipped):
                best = depth
        return best

    @property
    def copies(self) -> int:
        """The number of the deep model's blocks for which the repeated block of the shallow model stands."""
        return (self.layers - self.head) // self.period - 3

    @property
    def skipped(self) -> int:
        """The number of layers that the deep model has and the shallow one has not."""
        return (self.copies - 1) * self.period

    @property
    def kept(self) -> list[int]:
        """The layers of the deep model that are the shallow model's, in order."""
        first = self.head + 3 * self.period
        return [*range(first), *range(first + self.skipped, self.layers)]

    @property
    def note(self) -> str:
        """A sentence on the layers of which the shallow model has a block."""
        first, last = (self.head + blocks * self.period for blocks in (REPEATED, REPEATED + self.copies))
        shown = f"{first} stands" if self.period == 1 else f"{first} to {first + self.period - 1} stand"
        return f"{self.stack}.{shown} for {first} to {last - 1}, which are alike"

    @cached_property
    def _layer_number(self) -> re.Pattern[str]:
        return re.compile(rf"{re.escape(self.stack)}\.(\d+)(?=\.|$)")

    def layer(self, name: str) -> int | None:
        """The layer's number in a name; None outside of layers."""
        match = self._layer_number.match(name)
        return None if match is None else int(match[1])

    def block(self, layer: int | None) -> int | None:
        """The block of a layer of the shallow model; None outside of layers."""
        return None if layer is None else max(0, min((layer - self.head) // self.period, LAST))

    def shallow(self, layer: int) -> int:
        """The layer of the shallow model that stands for one of the deep model."""
        repeated = self.head + REPEATED * self.period
        if layer < repeated:
            return layer
        if layer >= self.head + 3 * self.period + self.skipped:
            return layer - self.skipped
        return repeated + (layer - repeated) % self.period

    def shift_name(self, name: str, by: int | None) -> str:
        """A name with `by` added to its layer's number; names outside of layers stay.

        If `by` is None, a number in the last block becomes the deep model's, and others stay. This is for names that
        an op outside of layers reads.
        """
        match = None if by == 0 else self._layer_number.match(name)
        if match is None:
            return name
        if by is None:
            by = self.shift_of(int(match[1]))
        return f"{self.stack}.{int(match[1]) + by}{name[match.end() :]}"

    def shift_of(self, layer: int) -> int:
        """The number by which a layer of the shallow model is shifted in the deep one; the first that it stands for."""
        return self.skipped if self.block(layer) == LAST else 0

    def count(self, name: str) -> int:
        """The number of the deep model's values or ops that the shallow model's value or op `name` represents."""
        return self.copies if self.block(self.layer(name)) == REPEATED else 1

    def in_text(self, text: str) -> str:
        """A text about the shallow model with the deep model's numbers of the layers in its last block."""

        def renumber(match: re.Match[str]) -> str:
            number = int(match[0])
            return str(number + self.skipped if self.block(number) == LAST else number)

        return re.sub(rf"(?<=`{re.escape(self.stack)}\.)\d+(?=[.`])", renumber, text)

    def names_a_layer(self, text: str) -> bool:
        """Whether a text quotes a name inside the stack, such as "`layers.3.mlp`"."""
        return re.search(rf"`{re.escape(self.stack)}\.\d", text) is not None

    def place(self, place: Place, by: int | None) -> Place:
        """A place with the number of its layer shifted."""
        layer = place.layer
        if by and layer is not None and layer.stack == self.stack:
            layer = layer._replace(number=layer.number + by)
        return place._replace(module=self.shift_name(place.module, by), layer=layer)

    def through(self, op: Through, by: int | None) -> Through:
        """A step of a chain of reasons, with the numbers of its layers shifted."""
        return op._replace(name=self.shift_name(op.name, by), module=self.shift_name(op.module, by))

    def info(self, info: Info, by: int | None) -> Info:
        """A node's metadata, with the numbers of layers in all names shifted."""
        if by == 0:
            return info
        comm = None if info.comm is None else self._collective(info.comm, by)
        return replace(info, origin=self.shift_name(info.origin, by), place=self.place(info.place, by), comm=comm)

    def _collective(self, comm: Collective, by: int | None) -> Collective:
        names = tuple(self.shift_name(name, by) for name in comm.value)
        return replace(comm, value=names, why=tuple(self._demand(demand, by) for demand in comm.why))

    def _demand(self, demand: Demand, by: int | None) -> Demand:
        return replace(
            demand, op=self.through(demand.op, by), value=self.shift_name(demand.value, by),
            mixes=self.shift_name(demand.mixes, by),
        )  # fmt: skip
