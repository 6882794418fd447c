"""A quantized weight as tensors that are sharded like the dense one, and an operation that makes it dense where it is
used: a frozen base of adapters is stored and gathered packed, and has no gradient (Dettmers et al. 2023, QLoRA).

    tpshard::dequantize(codes, scales, zeros, group, bits, dtype) -> w [..., outputs, inputs]

    codes  uint8 [..., outputs, inputs / per]: per = 8 / width fields in a byte, the first input's lowest
    scales fp16  [..., outputs, groups]
    zeros  uint8 [..., outputs, groups]
    group  int32 [..., inputs], the group of each input; None where equal runs of inputs are the groups

w = scales * (codes - zeros), rounded once to fp16 as servers do (`Quantized.dequantize`), then cast to `dtype`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tpshard.kernels.operation import LIBRARY, operation
from tpshard.kernels.quantized.packed import width_of
from tpshard.kernels.quantized.quantized import Quantized

CODES, SCALES, ZEROS, GROUP = "codes", "scales", "zeros", "group"
DTYPES = {CODES: torch.uint8, SCALES: torch.float16, ZEROS: torch.uint8, GROUP: torch.int32}
"""The tensors of a packed weight, and their dtypes."""


@dataclass(frozen=True)
class Coding:
    """How a weight is packed."""

    bits: int
    groups: int
    ordered: bool
    """Whether each input names its group: in act-order, or where groups are not of one size."""

    def shapes(self, weight: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors, by name. weight: the dense shape [..., outputs, inputs]."""
        *stack, outputs, inputs = weight
        groups = (*stack, outputs, self.groups)
        shapes = {CODES: (*stack, outputs, inputs * width_of(self.bits) // 8), SCALES: groups, ZEROS: groups}
        return shapes | ({GROUP: (*stack, inputs)} if self.ordered else {})

    def tensors(self, weight: Quantized) -> dict[str, Tensor]:
        """The tensors of one weight."""
        width = width_of(self.bits)
        fields = weight.codes.T.unflatten(1, (-1, 8 // width))
        codes = torch.zeros_like(fields[..., 0])
        for place in range(8 // width):
            codes |= fields[..., place] << (place * width)
        tensors = {CODES: codes, SCALES: weight.scales.T, ZEROS: weight.zeros.T}
        return tensors | ({GROUP: weight.group} if self.ordered else {})


def _dense(codes: Tensor, scales: Tensor, zeros: Tensor, group: Tensor | None, bits: int, dtype: torch.dtype) -> Tensor:
    width = width_of(bits)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
    values = ((codes.unsqueeze(-1) >> shifts) & ((1 << width) - 1)).flatten(-2)
    if group is None:
        runs = values.unflatten(-1, (scales.shape[-1], -1))
        steps = runs.to(torch.int16) - zeros.unsqueeze(-1).to(torch.int16)
        return (scales.unsqueeze(-1) * steps.to(scales.dtype)).flatten(-2).to(dtype)
    index = group.long().unsqueeze(-2).expand_as(values)
    steps = values.to(torch.int16) - zeros.gather(-1, index).to(torch.int16)
    return (scales.gather(-1, index) * steps.to(scales.dtype)).to(dtype)


def _shape(codes: Tensor, scales: Tensor, zeros: Tensor, group: Tensor | None, bits: int, dtype: torch.dtype) -> Tensor:
    *rows, columns = codes.shape
    return codes.new_empty((*rows, columns * (8 // width_of(bits))), dtype=dtype)


DEQUANTIZE = operation(
    "dequantize(Tensor codes, Tensor scales, Tensor zeros, Tensor? group, int bits, ScalarType dtype) -> Tensor",
    _dense, _shape,
)  # fmt: skip


@torch.library.register_vmap("tpshard::dequantize", lib=LIBRARY)
def _vmap(
    info: Any, in_dims: tuple[int | None, ...], codes: Tensor, scales: Tensor, zeros: Tensor, group: Tensor | None,
    bits: int, dtype: torch.dtype,
) -> tuple[Tensor, int]:  # fmt: skip
    """Stacked layers of a vectorized pipeline, all of whose tensors are stacked."""
    first = [
        None if x is None or dim is None else x.movedim(dim, 0)
        for x, dim in zip((codes, scales, zeros, group), in_dims)
    ]
    return DEQUANTIZE(*first, bits, dtype), 0
