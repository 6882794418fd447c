"""SwiGLU experts with quantized weights: `kernels.experts` with each expert's matrices packed for a device.

    quantized_experts(x [..., m], ids [..., k], weights [..., k], packed, invariant) -> [..., m]

The hidden columns between gate, up and down belong to this operation, so that their order is free: gate and up are
packed with their outputs in the order of the groups of down, and nothing is permuted between the products (the TP-aware
layout of each expert). Devices that hold some experts, or some hidden columns of each, return partial sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels.experts.experts import routed_sum
from tpshard.kernels.quantized.int4 import Int4, int4_linear
from tpshard.kernels.quantized.packed import Packed
from tpshard.kernels.quantized.quantized import Quantized, concatenate
from tpshard.kernels.quantized.quantized_linear import Prepared, prepare, quantized_gate, quantized_linear


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


def quantized_experts(x: Tensor, ids: Tensor, weights: Tensor, packed: list[PackedExpert], invariant: bool) -> Tensor:
    """The sum over each token's experts: x [..., m], ids and weights [..., k] -> [..., m].

    An id outside of `packed` belongs to another device and adds nothing. With `invariant` a row's bits do not depend on
    the other rows.
    """
    return routed_sum(x, ids, weights, len(packed), lambda e, rows: packed[e](rows, invariant))
