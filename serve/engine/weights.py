"""Loading a server's weights into a device's memory: each input in the layout that its port describes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels import linear
from tpshard.kernels.experts.quantized_experts import PackedExpert, StackedExperts
from tpshard.kernels.quantized.int4 import pack_parts
from tpshard.kernels.quantized.quantized import Quantized, concatenate, extend_groups
from tpshard.kernels.quantized.quantized_linear import prepare
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.program import Held, Port
from tpshard.parallelism.simulate import block
from tpshard.programs.server.act_order import Arrangement
from tpshard.programs.server.captured_steps import APART
from tpshard.programs.server.parameter_parts import ParameterPart

ReadBlock = Callable[[str, Sequence[int], Sequence[int]], Tensor]
"""A function (name, starts, sizes) -> that block of a dense parameter."""


def _no_expert(name: str, index: int, start: int, size: int) -> Quantized:
    raise AssertionError(f"matrix {index} of {name} is not quantized")


@dataclass(frozen=True)
class Weights:
    """A model's weights, readable by blocks."""

    shapes: Mapping[str, Sequence[int]]
    """Shapes as stored; a program's shapes may be larger, padded with zeros."""
    block: ReadBlock
    quantized: Callable[[str], Quantized | None] = lambda _name: None
    """The whole quantized form of a parameter; None for a dense one."""
    group: Callable[[str], Tensor | None] = lambda _name: None
    """The group of each input of a quantized parameter, int32 [inputs]; None for a dense one."""
    expert: Callable[[str, int, int, int], Quantized] = _no_expert
    """(name, index, start, size) -> outputs [start, start + size) of a quantized matrix of a stacked parameter."""

    def cut(self, parts: Mapping[str, ParameterPart]) -> Weights:
        """The weights with `parts` of parameters added as parameters of their own, by name."""

        def block(name: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
            part = parts.get(name)
            if part is None:
                return self.block(name, starts, sizes)
            shifted = [start + part.start * (dim == part.dim) for dim, start in enumerate(starts)]
            return self.block(part.parameter, shifted, sizes)

        def expert(name: str, index: int, start: int, size: int) -> Quantized:
            part = parts.get(name)
            if part is None:
                return self.expert(name, index, start, size)
            assert part.dim == 1, "quantized matrices are cut between outputs"
            return self.expert(part.parameter, index, part.start + start, size)

        shapes = {**self.shapes, **{name: part.shape for name, part in parts.items()}}
        return replace(self, shapes=shapes, block=block, expert=expert)


@dataclass
class Filler:
    """Builds the inputs of one device, by port. Each is built once and shared by the programs of all sizes."""

    weights: Weights
    arrangement: Arrangement
    shapes: Mapping[str, Sequence[int]]
    """Shapes of the parameters in the programs."""
    mesh: Mesh
    rank: int
    device: torch.device
    blocks: int
    """Usable blocks of the cache, besides block 0."""
    slotted: Collection[str] = ()
    """Parameters with a slot for each of several adapters, which begin as zeros."""
    made: dict[tuple[str, Held | None], Any] = field(default_factory=dict)
    """What was built, by name and form: programs of other sizes may hold a weight otherwise."""

    def __post_init__(self) -> None:
        # a linear's group and codes are read one after the other
        quantized, group = lru_cache(maxsize=2)(self.weights.quantized), lru_cache(maxsize=None)(self.weights.group)
        self.weights = replace(self.weights, quantized=quantized, group=group).cut(self.arrangement.parts)
        self._read_quantized = lru_cache(maxsize=2)(self._read_quantized)  # type: ignore[method-assign]

    def __call__(self, port: Port) -> Any:
        key = port.name, port.held
        if key not in self.made:
            self.made[key] = self._make(port)
        return self.made[key]

    def _make(self, port: Port) -> Any:
        if port.kind == "cache":
            return torch.zeros(self.blocks + 1, *port.local[1:], dtype=port.dtype, device=self.device)
        if port.kind == "state":
            return torch.zeros(port.local, dtype=port.dtype, device=self.device)
        if port.name in self.slotted:
            return torch.zeros(port.local, dtype=port.dtype, device=self.device)
        place = block(port.shape, port.layout, self.mesh, self.rank)
        if port.kind == "order":
            (start, size), order = place[0], self.arrangement.order(self.arrangement.inputs[port.name], self._group)
            return order[start : start + size].to(self.device)
        if port.held is None:
            return self._dense(port, port.name, place)
        if port.held.form in ("experts", APART):
            (first, count), hidden, _ = place
            experts = [self._pack_expert(port.held.of, expert, hidden) for expert in range(first, first + count)]
            return StackedExperts.of(experts) or experts
        layouts = port.held.layouts or [port.layout] * len(port.held.of)
        places = [block(self.shapes[name], own, self.mesh, self.rank) for name, own in zip(port.held.of, layouts)]
        if port.held.form in ("dense", "onednn"):
            dense = [self._dense(port, name, place) for name, place in zip(port.held.of, places)]
            whole = dense[0] if len(dense) == 1 else torch.cat(dense)
            return whole if port.held.form == "dense" else linear.pack(whole)
        parts = [self._read_quantized(name, place) for name, place in zip(port.held.of, places)]
        weight = parts[0] if len(parts) == 1 else concatenate(parts)
        if port.held.form in ("int4 parts", "dense parts"):
            return pack_parts(weight, port.held.form == "dense parts")
        return prepare(weight, self.device)

    def put(self, port: Port, slot: int, value: Tensor | None) -> None:
        """Writes an adapter's factor [n, k] into a slot of `lora_A` or `lora_B`, with zeros beyond it; None: zeros."""
        (first, count), *place = block(port.shape, port.layout, self.mesh, self.rank)
        if not first <= slot < first + count:
            return
        own = self(port)[slot - first]
        if value is None:
            own.zero_()
            return
        (n, k), (outputs, inputs) = value.shape, port.shape[1:]
        whole = F.pad(value, (0, inputs - k, 0, outputs - n))
        own.copy_(whole[tuple(slice(start, start + size) for start, size in place)])

    def _dense(self, port: Port, name: str, place: Sequence[tuple[int, int]]) -> Tensor:
        """A block of a parameter, with outputs and inputs in the program's order."""
        if self.weights.quantized(name) is not None:
            values = self._read_quantized(name, place).dequantize(torch.float32).T
            return values.to(self.device, port.dtype).contiguous()
        columns = self.arrangement.columns_of(name, self._group) if place else None
        if columns is None:
            value = self._read_dense(name, place)
        else:
            (start, size), *rest = place
            value = self._read_dense(name, ((0, len(columns)), *rest))[columns[start : start + size]]
        return value.to(self.device, port.dtype).contiguous()

    def _read_dense(self, name: str, place: Sequence[tuple[int, int]]) -> Tensor:
        """A block of a parameter, with zeros beyond what is stored."""
        lengths = [max(0, min(size, n - start)) for n, (start, size) in zip(self.weights.shapes[name], place)]
        if 0 in lengths:
            return torch.zeros([size for _, size in place])
        missing = [x for (_, size), present in zip(reversed(place), reversed(lengths)) for x in (0, size - present)]
        return F.pad(self.weights.block(name, [start for start, _ in place], lengths), missing)

    def _read_quantized(self, name: str, place: Sequence[tuple[int, int]]) -> Quantized:
        """A block of a quantized parameter, in the program's order."""
        whole = self.weights.quantized(name)
        assert whole is not None, f"{name} is not quantized"
        columns, rows = self.arrangement.columns_of(name, self._group), self.arrangement.rows_of(name, self._group)
        outputs, inputs = self.shapes[name]
        own = whole.pad(inputs, outputs).take_columns(_cut(columns, place[0])).take_rows(_cut(rows, place[1]))
        return replace(own, bias=None)  # the bias is a parameter of its own

    def _pack_expert(self, names: Sequence[str], expert: int, hidden: tuple[int, int]) -> PackedExpert:
        """One expert with this device's hidden columns. names: gate, up and down."""
        matrices = []
        for name in names:
            whole = self.weights.expert(name, expert, 0, self.weights.shapes[name][1])
            _, outputs, inputs = self.shapes[name]
            matrices.append(whole.pad(inputs, outputs))
        start, size = hidden
        gate, up, down = matrices
        return PackedExpert.pack(gate, up, down, slice(start, start + size), self.device)

    def _group(self, name: str) -> Tensor | None:
        """`Weights.group`, extended to the program's number of inputs."""
        index = self.weights.group(name)
        return None if index is None else extend_groups(index, self.shapes[name][1])


def _cut(order: Tensor | None, part: tuple[int, int]) -> Tensor:
    start, size = part
    return torch.arange(start, start + size) if order is None else order[start : start + size]
