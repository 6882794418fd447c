"""SwiGLU experts with quantized weights: `kernels.experts` with each expert's matrices packed for a device.

    quantized_experts(x [..., m], ids [..., k], weights [..., k], packed, invariant) -> [..., m]

Where all experts are packed alike for a GPU they are one stack, and a product of all of them is one launch; else the
host reads how many tokens each expert has, and multiplies one expert after the other.

The hidden columns between gate, up and down belong to this operation, so that their order is free: gate and up are
packed with their outputs in the order of the groups of down, and nothing is permuted between the products (the TP-aware
layout of each expert). Devices that hold some experts, or some hidden columns of each, return partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels.experts.experts import routed_sum
from tpshard.kernels.quantized.int4 import Int4, int4_linear
from tpshard.kernels.quantized.packed import Packed
from tpshard.kernels.quantized.quantized import Quantized, concatenate
from tpshard.kernels.quantized.quantized_linear import Prepared, prepare, quantized_gate, quantized_linear
from tpshard.kernels.triton_device import capability_of


@dataclass(frozen=True)
class OrderedInputs:
    """A packed matrix whose inputs are read in an order."""

    weight: Prepared
    order: Tensor | None
    """int64 [inputs]; None for inputs in sequence."""

    @staticmethod
    def pack(weight: Quantized, device: torch.device | str) -> OrderedInputs:
        """The matrix with its inputs sorted by group."""
        if weight.sorted:
            return OrderedInputs(prepare(weight, device), None)
        order = weight.order()
        return OrderedInputs(prepare(weight.take_rows(order), device), order.to(device))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.weight.nbytes + (0 if self.order is None else self.order.nbytes)

    def __call__(self, x: Tensor, invariant: bool) -> Tensor:
        """The product x [n, inputs] -> [n, outputs]."""
        return _product(self.take(x), self.weight, invariant)

    def take(self, x: Tensor) -> Tensor:
        """x [n, inputs] in the order of the matrix."""
        return x if self.order is None else x.index_select(-1, self.order)


@dataclass(frozen=True)
class PackedExpert:
    """The packed matrices of one expert, or of a device's hidden columns of it."""

    inward: tuple[OrderedInputs, ...]
    """gate and up side by side in one matrix; two matrices where their groups differ."""
    down: Prepared

    @staticmethod
    def pack(
        gate: Quantized, up: Quantized, down: Quantized, hidden: slice, device: torch.device | str
    ) -> PackedExpert:
        """The expert's matrices [inputs, outputs] with the columns `hidden`, counted in the order of down's groups."""
        columns = down.order()[hidden]
        gate, up, down = gate.take_columns(columns), up.take_columns(columns), down.take_rows(columns)
        alike = gate.bits == up.bits and torch.equal(gate.group, up.group)
        inward = [concatenate([gate, up])] if alike else [gate, up]
        packed = tuple(OrderedInputs.pack(weight, device) for weight in inward)
        return PackedExpert(packed, prepare(down, device))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.down.nbytes + sum(one.nbytes for one in self.inward)

    def __call__(self, x: Tensor, invariant: bool) -> Tensor:
        """The expert's result for tokens x [n, m] -> [n, m], a partial sum where columns are left out."""
        return _product(self._hidden(x, invariant), self.down, invariant)

    def _hidden(self, x: Tensor, invariant: bool) -> Tensor:
        first, *rest = self.inward
        if rest:
            gate, up = (one(x, invariant) for one in self.inward)
        elif isinstance(first.weight, Packed):
            return quantized_gate(first.take(x), first.weight, invariant)
        else:
            gate, up = first(x, invariant).chunk(2, -1)
        return F.silu(gate) * up


def _product(x: Tensor, weight: Prepared, invariant: bool) -> Tensor:
    """x [n, inputs] -> [n, outputs]. On a CPU a row's bits never depend on the other rows."""
    return int4_linear(x, weight) if isinstance(weight, Int4) else quantized_linear(x, weight, invariant)


@dataclass(frozen=True)
class StackedExperts:
    """Experts whose matrices are packed alike, each tensor with all experts one after another along its first dim."""

    count: int
    inward: Packed
    """gate and up side by side."""
    down: Packed
    order: Tensor | None
    """int64 [count, inputs]: the order in which each expert reads its inputs; None for inputs in sequence."""

    @staticmethod
    def of(experts: list[PackedExpert]) -> StackedExperts | None:
        """The stack of these experts; None where they are not alike, or not for a GPU."""
        inward = _stack([one.inward[0].weight for one in experts if len(one.inward) == 1], len(experts))
        down = _stack([one.down for one in experts], len(experts))
        if inward is None or down is None:
            return None
        inputs = torch.arange(inward.inputs, device=inward.words.device)
        orders = [one.inward[0].order for one in experts]
        alike = all(order is None for order in orders)
        order = None if alike else torch.stack([inputs if order is None else order for order in orders])
        return StackedExperts(len(experts), inward, down, order)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, invariant: bool) -> Tensor:
        """The sum over each token's experts; arguments as of `quantized_experts`."""
        from tpshard.kernels import triton_launch
        from tpshard.kernels.experts.triton_experts import SortedChoices, combine

        rows, k = x.reshape(-1, x.shape[-1]), ids.shape[-1]
        mean = 1 if invariant else ids.numel() // self.count
        # the programs that fill a device are those of all experts that have tokens
        share, capability = max(1, 132 // min(self.count, 8)), capability_of(x)
        tiles = [
            triton_launch.tiles(mean, one, one is self.inward, share, capability)[0] for one in (self.inward, self.down)
        ]
        choices = SortedChoices(ids, self.count, x.dtype, invariant, tiles[0].rows)
        if self.order is not None:
            own = ids.reshape(-1).clamp(0, self.count - 1)
            rows = rows.repeat_interleave(k, 0).gather(1, self.order[own])
        hidden = triton_launch.matmul(rows.contiguous(), self.inward, True, tiles[0], choices)
        out = triton_launch.matmul(hidden, self.down, False, tiles[1], choices)
        return combine(out, weights.reshape(-1, k)).view(x.shape)


def _stack(matrices: Sequence[Prepared], count: int) -> Packed | None:
    """Matrices packed for a GPU as one; None unless there are `count` that are alike."""
    packed = [one for one in matrices if isinstance(one, Packed)]
    if len(packed) < count or len({_form(one) for one in packed}) > 1:
        return None
    zeros = None
    if any(one.zeros is not None for one in packed):
        middle = [torch.full_like(one.scales, 1 << (one.bits - 1), dtype=torch.uint8) for one in packed]
        zeros = torch.cat([own if one.zeros is None else one.zeros for one, own in zip(packed, middle)])
    words, scales = (torch.cat([getattr(one, name) for one in packed]) for name in ("words", "scales"))
    return replace(packed[0], words=words, scales=scales, zeros=zeros)


def _form(one: Packed) -> tuple[object, ...]:
    """What must be equal for matrices in one stack."""
    pieces = None if one.pieces is None else one.pieces.cpu().numpy().tobytes()
    sizes = one.bits, one.width, one.inputs, one.chunk, one.group_chunks, one.first_chunk, one.quads
    return *sizes, one.words.shape, one.scales.shape, one.bias is None, pieces


def quantized_experts(
    x: Tensor, ids: Tensor, weights: Tensor, packed: list[PackedExpert] | StackedExperts, invariant: bool
) -> Tensor:
    """The sum over each token's experts: x [..., m], ids and weights [..., k] -> [..., m].

    An id outside of `packed` belongs to another device and adds nothing. With `invariant` a row's bits do not depend on
    the other rows.
    """
    if isinstance(packed, StackedExperts):
        return packed(x, ids, weights, invariant)
    return routed_sum(x, ids, weights, len(packed), lambda e, rows: packed[e](rows, invariant))
