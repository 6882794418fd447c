"""Quantized weights as the program of `kernels.llvm_quantized` reads them on a CPU.

Columns lie in blocks of COLUMNS, each with all its inputs, so that a thread reads a block from front to back. A byte
holds the codes of 8 / bits successive inputs of one column, the first in its lowest bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels.llvm_quantized import COLUMNS, SPAN
from tpshard.kernels.packed import width_of
from tpshard.kernels.quantized import Quantized


@dataclass(frozen=True)
class Blocked:
    """codes uint8 [blocks, inputs * width / 8, COLUMNS]; scales fp16 and zeros uint8 [blocks, groups, COLUMNS];
    spans int32 [spans, 2]: the input at which each ends, and its group; bias [columns] or None.

    width: bits of a code here: 3-bit codes take 4, and codes of any bits 8 where a group begins within a byte. Columns
    beyond `columns` are 0.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    spans: Tensor
    bias: Tensor | None
    bits: int
    width: int
    inputs: int
    columns: int

    @property
    def nbytes(self) -> int:
        held = (self.codes, self.scales, self.zeros, self.spans, self.bias)
        return sum(t.nbytes for t in held if t is not None)


def block(weight: Quantized) -> Blocked:
    """A CPU's form of a linear whose rows are sorted by group. Raises ValueError where rows of a group are apart."""
    if not weight.sorted:
        raise ValueError("Rows of a group must be adjacent: sort them first, and gather the inputs alike.")
    spans, width = _spans(weight.group), width_of(weight.bits)
    if bool((spans[:, 0] % (8 // width)).any()):
        width = 8
    per_byte = 8 // width
    fields = weight.codes.view(-1, per_byte, weight.outputs)
    packed = torch.zeros_like(fields[:, 0])
    for place in range(per_byte):
        packed |= fields[:, place] << (width * place)
    return Blocked(
        codes=_in_blocks(packed),
        scales=_in_blocks(weight.scales.to(torch.float16)),
        zeros=_in_blocks(weight.zeros),
        spans=spans,
        bias=weight.bias,
        bits=weight.bits,
        width=width,
        inputs=weight.inputs,
        columns=weight.outputs,
    )


def unblocked(weight: Blocked) -> Quantized:
    """The plain tensors again."""
    mask = (1 << weight.width) - 1
    packed = _side_by_side(weight.codes, weight.columns)
    fields = torch.stack([packed >> shift & mask for shift in range(0, 8, weight.width)], 1)
    codes = fields.view(-1, weight.columns)[: weight.inputs]
    ends, group = weight.spans.long().unbind(1)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    return Quantized(
        codes,
        _side_by_side(weight.scales, weight.columns),
        _side_by_side(weight.zeros, weight.columns),
        group.repeat_interleave(sizes).to(torch.int32),
        weight.bits,
        weight.bias,
    )


def _in_blocks(rows: Tensor) -> Tensor:
    """[n, columns] -> [blocks, n, COLUMNS]"""
    wide = F.pad(rows, (0, -rows.shape[1] % COLUMNS))
    return wide.view(len(rows), -1, COLUMNS).transpose(0, 1).contiguous()


def _side_by_side(blocks: Tensor, columns: int) -> Tensor:
    return blocks.transpose(0, 1).reshape(blocks.shape[1], -1)[:, :columns]


def _spans(group: Tensor) -> Tensor:
    """Runs of one group, cut at SPAN inputs."""
    groups, sizes = torch.unique_consecutive(group, return_counts=True)
    found, end = list[tuple[int, int]](), 0
    for g, size in zip(groups.tolist(), sizes.tolist()):
        stop = end + size
        while end < stop:
            end = min(end + SPAN, stop)
            found.append((end, g))
    return torch.tensor(found, dtype=torch.int32).view(-1, 2)
