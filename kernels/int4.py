"""Quantized weights of up to 4 bits as torch's int4 product for a CPU takes them.

    y [rows, columns] = x [rows, inputs] @ w,    w[k, n] = scales[g, n] * (codes[k, n] - 8) + shifts[g, n]

`aten::_weight_int4pack_mm_for_cpu` is fast in bf16 alone: x, scales, shifts and y are rounded to bf16, sums are fp32. A
weight differs from the file's by up to 2**-9 of it, and by up to a 64th of a step where its zero is not the middle
code. A row's bits do not depend on the others.

The operation knows groups of 32, 64, 128 and 256 inputs that are all of one size. Groups that are multiples of one of
these are cut; others are filled up, with inputs of 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels.quantized import Quantized

BITS = (2, 3, 4)
GROUPS = (256, 128, 64, 32)
COLUMNS = 16
"""Columns come in multiples of it."""


@dataclass(frozen=True)
class Int4:
    """codes: as the operation packs them; scales bf16 [groups, columns filled up, 2]: scale and shift; take int64
    [inputs filled up]: which input is multiplied there, `inputs` for a 0; None where nothing is filled up."""

    codes: Tensor
    scales: Tensor
    take: Tensor | None
    group: int
    """Inputs that share a scale."""
    inputs: int
    columns: int

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scales, self.take) if t is not None)


def group_of(sizes: list[int]) -> int:
    """The largest group of the operation's that divides all of `sizes`; the smallest where none does."""
    return next((group for group in GROUPS if all(size % group == 0 for size in sizes)), GROUPS[-1])


def row_bytes(sizes: list[int]) -> int:
    """Bytes that a column takes whose groups have these sizes."""
    group = group_of(sizes)
    filled = sum(-(-size // group) * group for size in sizes)
    return filled // 2 + 4 * filled // group


def pack(weight: Quantized) -> Int4:
    """ValueError where rows of a group are apart, or codes have more than 4 bits."""
    if not weight.sorted:
        raise ValueError("Rows of a group must be adjacent: sort them first, and gather the inputs alike.")
    if weight.bits not in BITS:
        raise ValueError(f"Codes of {weight.bits} bits do not fit 4.")
    groups, counts = torch.unique_consecutive(weight.group.long(), return_counts=True)
    sizes = counts.tolist()
    group, start = group_of(sizes), 0
    taken, of = list[Tensor](), list[Tensor]()
    for index, size in zip(groups.tolist(), sizes):
        filled = -(-size // group) * group
        taken.append(torch.arange(start, start + size))
        taken.append(torch.full((filled - size,), weight.inputs))
        of.append(torch.full((filled // group,), index))
        start += size
    take, parts = torch.cat(taken), torch.cat(of)
    middle = 1 << (weight.bits - 1)  # of the codes; 8 is that of the operation's
    codes = F.pad(weight.codes, (0, 0, 0, 1))[take].T + (8 - middle)
    scale = weight.scales[parts].bfloat16().float()
    shift = (middle - weight.zeros[parts].float()) * scale
    missing = -weight.outputs % COLUMNS
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(F.pad(codes.int(), (0, 0, 0, missing)).contiguous(), 1)
    scales = F.pad(torch.stack([scale, shift], -1), (0, 0, 0, missing)).bfloat16().contiguous()
    return Int4(packed, scales, take if len(take) > weight.inputs else None, group, weight.inputs, weight.outputs)


def int4_linear(x: Tensor, weight: Int4) -> Tensor:
    """x bf16 [..., inputs] -> bf16 [..., columns]"""
    rows = x.reshape(-1, weight.inputs)
    if weight.take is not None:
        rows = F.pad(rows, (0, 1)).index_select(-1, weight.take)
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows.contiguous(), weight.codes, weight.group, weight.scales)
    return y[:, : weight.columns].view(*x.shape[:-1], weight.columns)
