"""Quantized weights of up to 4 bits in the layout of torch's int4 matrix product on a CPU.

    y [rows, columns] = x [rows, inputs] @ w,    w[k, n] = scales[g, n] * (codes[k, n] - 8) + shifts[g, n]

`aten::_weight_int4pack_mm_for_cpu` is fast only in bf16: x, scales, shifts and y are rounded to bf16, sums are fp32. A
weight differs from the file's by up to 2**-9 of its value, and by up to 1/64 of a quantization step where its zero is
not the middle code. A row's bits do not depend on the other rows.

All groups of the operation have one size: 32, 64, 128 or 256 inputs. Larger groups that are multiples of one of these
are split; others are padded with inputs of 0.
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
"""The number of columns is padded to a multiple of this."""


@dataclass(frozen=True)
class Int4:
    """A weight packed for the operation.

    codes: packed by torch. scales: bf16 [groups, padded columns, 2], (scale, shift). take: int64 [padded inputs], the
    input at each place, `inputs` for a padding of 0; None where nothing is padded.
    """

    codes: Tensor
    scales: Tensor
    take: Tensor | None
    group: int
    """Inputs that share a scale."""
    inputs: int
    columns: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in (self.codes, self.scales, self.take) if t is not None)


def group_of(sizes: list[int]) -> int:
    """The largest group size of the operation that divides all `sizes`; the smallest one where none does."""
    return next((group for group in GROUPS if all(size % group == 0 for size in sizes)), GROUPS[-1])


def row_bytes(sizes: list[int]) -> int:
    """Bytes of one packed column whose groups have these sizes."""
    group = group_of(sizes)
    filled = sum(-(-size // group) * group for size in sizes)
    return filled // 2 + 4 * filled // group


def pack(weight: Quantized) -> Int4:
    """The layout for `int4_linear`. Raises ValueError where groups are not adjacent or codes have more than 4 bits."""
    if not weight.sorted:
        raise ValueError("Rows of a group must be adjacent: sort them first, and reorder the inputs alike.")
    if weight.bits not in BITS:
        raise ValueError(f"Codes of {weight.bits} bits do not fit in 4 bits.")
    groups, counts = torch.unique_consecutive(weight.group.long(), return_counts=True)
    sizes = counts.tolist()
    group, start = group_of(sizes), 0
    row_runs, group_rows = list[Tensor](), list[Tensor]()
    for index, size in zip(groups.tolist(), sizes):
        filled = -(-size // group) * group
        row_runs.append(torch.arange(start, start + size))
        row_runs.append(torch.full((filled - size,), weight.inputs))
        group_rows.append(torch.full((filled // group,), index))
        start += size
    take, parts = torch.cat(row_runs), torch.cat(group_rows)
    middle = 1 << (weight.bits - 1)  # the middle code of the file; that of the operation is 8
    codes = F.pad(weight.codes, (0, 0, 0, 1))[take].T + (8 - middle)
    scale = weight.scales[parts].bfloat16().float()
    shift = (middle - weight.zeros[parts].float()) * scale
    missing = -weight.outputs % COLUMNS
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(F.pad(codes.int(), (0, 0, 0, missing)).contiguous(), 1)
    scales = F.pad(torch.stack([scale, shift], -1), (0, 0, 0, missing)).bfloat16().contiguous()
    return Int4(packed, scales, take if len(take) > weight.inputs else None, group, weight.inputs, weight.outputs)


def int4_linear(x: Tensor, weight: Int4) -> Tensor:
    """The product with a packed weight: x bf16 [..., inputs] -> bf16 [..., columns]."""
    rows = x.reshape(-1, weight.inputs)
    if weight.take is not None:
        rows = F.pad(rows, (0, 1)).index_select(-1, weight.take)
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows.contiguous(), weight.codes, weight.group, weight.scales)
    return y[:, : weight.columns].view(*x.shape[:-1], weight.columns)
