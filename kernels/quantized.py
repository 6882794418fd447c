"""A quantized linear as plain tensors, whatever file or kernel it came from or goes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Quantized:
    """w[k, n] = scales[group[k], n] * (codes[k, n] - zeros[group[k], n]);  y = x @ w + bias.

    codes  uint8 [in, out], below 2**bits
    scales fp16  [groups, out]
    zeros  uint8 [groups, out]: up to 2**bits - 1
    group  int32 [in]: which row of `scales` an input row uses. Any order; not a permutation
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
        return self.codes.shape[0]

    @property
    def outputs(self) -> int:
        return self.codes.shape[1]

    @property
    def groups(self) -> int:
        return self.scales.shape[0]

    @property
    def symmetric(self) -> bool:
        """Whether every zero is 2**(bits - 1), so that kernels may take it as a constant."""
        return bool((self.zeros == 1 << (self.bits - 1)).all())

    @property
    def sorted(self) -> bool:
        """Whether rows of one group are adjacent and groups ascend."""
        return bool((self.group[1:] >= self.group[:-1]).all())

    def check(self, name: str = "quantized linear") -> Quantized:
        """Returns itself. Raises ValueError naming `name` where shapes, types or ranges contradict each other."""
        shape = (self.groups, self.outputs)
        if self.codes.dtype != torch.uint8 or self.zeros.dtype != torch.uint8 or self.group.dtype != torch.int32:
            raise ValueError(f"{name}: codes and zeros must be uint8 and group int32.")
        if tuple(self.zeros.shape) != shape or tuple(self.group.shape) != (self.inputs,):
            raise ValueError(
                f"{name}: codes {list(self.codes.shape)}, scales {list(self.scales.shape)}, zeros "
                f"{list(self.zeros.shape)} and group {list(self.group.shape)} do not belong together."
            )
        if self.bias is not None and tuple(self.bias.shape) != (self.outputs,):
            raise ValueError(f"{name}: bias {list(self.bias.shape)} for {self.outputs} outputs.")
        if self.inputs and not (int(self.group.min()) >= 0 and int(self.group.max()) < self.groups):
            raise ValueError(f"{name}: g_idx names groups outside 0..{self.groups - 1}.")
        if not bool(torch.isfinite(self.scales).all()):
            raise ValueError(f"{name}: scales are not finite.")
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Dense weights [in, out]: fp16 by one rounding of scales * (codes - zeros), then cast to `dtype`."""
        index = self.group.long()
        steps = self.codes.to(torch.int16) - self.zeros[index].to(torch.int16)
        dense = self.scales[index] * steps.to(self.scales.dtype)
        return dense if dtype is None else dense.to(dtype)

    def order(self) -> Tensor:
        """The stable permutation [in] that makes rows of one group adjacent."""
        return torch.argsort(self.group, stable=True)

    def take_rows(self, rows: Tensor) -> Quantized:
        """Input rows `rows`, in that order. Groups are numbered anew as they appear; unused ones are dropped."""
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
        """Output columns `columns`, in that order, with their scales, zeros and biases."""
        return replace(
            self,
            codes=self.codes[:, columns],
            scales=self.scales[:, columns],
            zeros=self.zeros[:, columns],
            bias=None if self.bias is None else self.bias[columns],
        )

    def padded(self, inputs: int, outputs: int) -> Quantized:
        """With further inputs and outputs whose weights are exactly 0, in every form that the weights are given.

        Their scales are 0; inputs that fill a group up (see `longer`) have its zeros as codes.
        """
        rows, columns = inputs - self.inputs, outputs - self.outputs
        if not rows and not columns:
            return self
        group = longer(self.group, inputs)
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
        bias = None if self.bias is None else self.bias.to(device)
        codes, scales, zeros, group = (t.to(device) for t in (self.codes, self.scales, self.zeros, self.group))
        return Quantized(codes, scales, zeros, group, self.bits, bias)


def group_index(inputs: int, group_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Sequential groups: int32 [inputs]. group_size -1 is one group."""
    size = inputs if group_size == -1 else group_size
    return (torch.arange(inputs, device=device) // size).to(torch.int32)


def group_count(inputs: int, group_size: int) -> int:
    return 1 if group_size == -1 else -(-inputs // group_size)


def longer(group: Tensor, inputs: int) -> Tensor:
    """`group` [in] for more inputs: they fill the last group, and are further ones of the same size; one group stays
    one."""
    sizes = torch.bincount(group.long())
    size = int(sizes.max()) if len(sizes) > 1 else inputs
    more = torch.arange(len(group), inputs, device=group.device) // size
    return torch.cat([group, more.clamp(min=len(sizes) - 1).to(group.dtype)])


def reference_matmul(x: Tensor, weight: Quantized) -> Tensor:
    """x[..., in] -> [..., out] in x's dtype: dense weights as the file means them, product in fp32 or wider.

    The oracle of every fused kernel. fp32 (or fp64) x gives the exact product of the fp16 weights to that precision.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(wide) @ weight.dequantize(wide)
    if weight.bias is not None:
        y = y + weight.bias.to(wide)
    return y.to(x.dtype)


def concatenate(parts: Sequence[Quantized]) -> Quantized:
    """Side by side along the outputs. All parts must share one `group`; raises ValueError otherwise."""
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
