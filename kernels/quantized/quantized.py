"""A quantized linear as plain tensors, independent of file formats and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels.dtypes import wide_dtype


@dataclass(frozen=True)
class Quantized:
    """A quantized weight: w[k, n] = scales[group[k], n] * (codes[k, n] - zeros[group[k], n]);  y = x @ w + bias.

    codes  uint8 [in, out], below 2**bits
    scales fp16  [groups, out]
    zeros  uint8 [groups, out]: up to 2**bits - 1
    group  int32 [in]: the row of `scales` that an input uses, in any order
    bias   [out] or None
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group: Tensor
    bits: int
    bias: Tensor | None = None

    @property
    def inputs(self) -> int:
        """Number of inputs (rows of `codes`)."""
        return self.codes.shape[0]

    @property
    def outputs(self) -> int:
        """Number of outputs (columns of `codes`)."""
        return self.codes.shape[1]

    @property
    def groups(self) -> int:
        """Number of groups of inputs that share a scale."""
        return self.scales.shape[0]

    @property
    def symmetric(self) -> bool:
        """Whether every zero is 2**(bits - 1), so that kernels can use a constant."""
        return bool((self.zeros == 1 << (self.bits - 1)).all())

    @property
    def sorted(self) -> bool:
        """Whether the rows of each group are adjacent and groups ascend."""
        return bool((self.group[1:] >= self.group[:-1]).all())

    def check(self, name: str = "quantized linear") -> Quantized:
        """Checks shapes, dtypes and ranges, and returns the weight itself. Raises ValueError naming `name` where
        shapes, dtypes or ranges contradict each other.
        """
        shape = (self.groups, self.outputs)
        if self.codes.dtype != torch.uint8 or self.zeros.dtype != torch.uint8 or self.group.dtype != torch.int32:
            raise ValueError(f"{name}: codes and zeros must be uint8 and group int32.")
        if tuple(self.zeros.shape) != shape or tuple(self.group.shape) != (self.inputs,):
            raise ValueError(
                f"{name}: codes {list(self.codes.shape)}, scales {list(self.scales.shape)}, zeros "
                f"{list(self.zeros.shape)} and group {list(self.group.shape)} have contradicting shapes."
            )
        if self.bias is not None and tuple(self.bias.shape) != (self.outputs,):
            raise ValueError(f"{name}: bias {list(self.bias.shape)} for {self.outputs} outputs.")
        if self.inputs and not (int(self.group.min()) >= 0 and int(self.group.max()) < self.groups):
            raise ValueError(f"{name}: g_idx names groups outside 0..{self.groups - 1}.")
        if not bool(torch.isfinite(self.scales).all()):
            raise ValueError(f"{name}: scales are not finite.")
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense weight [in, out]: scales * (codes - zeros) rounded once to fp16, then cast to `dtype`."""
        index = self.group.long()
        steps = self.codes.to(torch.int16) - self.zeros[index].to(torch.int16)
        dense = self.scales[index] * steps.to(self.scales.dtype)
        return dense if dtype is None else dense.to(dtype)

    def order(self) -> Tensor:
        """The stable permutation [in] that sorts rows by group."""
        return torch.argsort(self.group, stable=True)

    def take_rows(self, rows: Tensor) -> Quantized:
        """The part of the layer that multiplies the inputs `rows`, in that order.

        Groups are renumbered as they appear; unused ones are dropped.
        """
        used, inverse = torch.unique(self.group[rows].long(), return_inverse=True)
        place = torch.arange(len(rows), device=inverse.device)
        first = torch.full_like(used, len(rows)).scatter_reduce(0, inverse, place, "amin")
        appearance = torch.argsort(first)
        used, group = used[appearance], torch.argsort(appearance)[inverse]
        return replace(
            self,
            codes=self.codes[rows],
            scales=self.scales[used],
            zeros=self.zeros[used],
            group=group.to(torch.int32),
        )

    def take_columns(self, columns: Tensor) -> Quantized:
        """The linear with output columns `columns` in that order, with their scales, zeros and biases."""
        return replace(
            self,
            codes=self.codes[:, columns],
            scales=self.scales[:, columns],
            zeros=self.zeros[:, columns],
            bias=None if self.bias is None else self.bias[columns],
        )

    def pad(self, inputs: int, outputs: int) -> Quantized:
        """The linear padded to more inputs and outputs, whose weights are exactly 0 in every layout.

        Added groups and outputs have scale 0. Inputs added to a group (see `extend_groups`) have its zero as code.
        """
        rows, columns = inputs - self.inputs, outputs - self.outputs
        if not rows and not columns:
            return self
        group = extend_groups(self.group, inputs)
        groups = max(0, int(group.max()) + 1 - self.groups)
        middle = 1 << (self.bits - 1)
        zeros = F.pad(self.zeros, (0, columns, 0, groups), value=middle)
        codes = F.pad(self.codes, (0, columns), value=middle)
        return Quantized(
            torch.cat([codes, zeros[group[self.inputs :].long()]]),
            F.pad(self.scales, (0, columns, 0, groups)),
            zeros,
            group,
            self.bits,
            None if self.bias is None else F.pad(self.bias, (0, columns)),
        )

    def to(self, device: torch.device | str) -> Quantized:
        held: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **held)


def group_index(inputs: int, group_size: int, device: torch.device | str = "cpu") -> Tensor:
    """The groups of consecutive inputs, int32 [inputs]. group_size -1 is one group."""
    size = inputs if group_size == -1 else group_size
    return (torch.arange(inputs, device=device) // size).to(torch.int32)


def group_count(inputs: int, group_size: int) -> int:
    return 1 if group_size == -1 else -(-inputs // group_size)


def extend_groups(group: Tensor, inputs: int) -> Tensor:
    """Extends `group`, the group of each input, to `inputs` entries: fills the last group, then adds groups.

    Filled and added groups have the size of the largest; a single group takes all new inputs.
    """
    sizes = torch.bincount(group.long())
    size = int(sizes.max()) if len(sizes) > 1 else inputs
    more = torch.arange(len(group), inputs, device=group.device) // size
    return torch.cat([group, more.clamp(min=len(sizes) - 1).to(group.dtype)])


def reference_matmul(x: Tensor, weight: Quantized) -> Tensor:
    """x [..., in] @ weight + bias -> [..., out] in x's dtype, by dequantizing; the product is in fp32 or wider.

    The reference of every fused kernel. With fp32 or fp64 x it is exact for the fp16 weights to that precision.
    """
    wide = wide_dtype(x)
    y = x.to(wide) @ weight.dequantize(wide)
    if weight.bias is not None:
        y = y + weight.bias.to(wide)
    return y.to(x.dtype)


def concatenate(parts: Sequence[Quantized]) -> Quantized:
    """Linears side by side along the outputs. Raises ValueError unless all have the same bits and `group`."""
    first = parts[0]
    if any(part.bits != first.bits or not torch.equal(part.group, first.group) for part in parts):
        raise ValueError("Only linears of the same bits and the same g_idx can be put side by side.")
    bias = None
    if any(part.bias is not None for part in parts):
        bias = torch.cat([p.scales.new_zeros(p.outputs) if p.bias is None else p.bias for p in parts])
    return Quantized(
        torch.cat([p.codes for p in parts], 1),
        torch.cat([p.scales for p in parts], 1),
        torch.cat([p.zeros for p in parts], 1),
        first.group,
        first.bits,
        bias,
    )
