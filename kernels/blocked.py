"""Quantized weights as the program of `kernels.llvm_quantized` reads them on a CPU.

Columns lie in panels of COLUMNS. A panel is read from front to back: span by span, in each column by column, and in
those chunk by chunk. A chunk is CHUNK codes of one column, and a byte of it holds 8 / width codes that lie as far apart
as a chunk has bytes, the first one in its lowest bits: one shift and one mask give codes of successive inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels.packed import width_of
from tpshard.kernels.quantized import Quantized

COLUMNS = 16
"""Columns of a panel."""
CHUNK = 32
"""Inputs decoded at once: 16 bytes of codes of 4 bits."""
SPAN = 128
"""Inputs whose weights are held decoded: with COLUMNS columns 8 KiB, a quarter of a common first cache."""


@dataclass(frozen=True)
class Blocked:
    """codes uint8 [panels, bytes]; scales fp16 and zeros uint8 [panels, groups, COLUMNS]; spans int32 [spans, 2]: the
    input at which each ends, and its group; bias [columns] or None.

    width: bits of a code here, 3-bit codes take 4. A span whose length is not a multiple of CHUNK is filled up with
    weights of 0, as are the columns beyond `columns`.
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
    scales, zeros = _in_panels(weight.scales.to(torch.float16)), _in_panels(weight.zeros)
    codes, parts, start = _in_panels(weight.codes), list[Tensor](), 0
    for end, group in spans.tolist():
        part = codes[:, start:end]
        if missing := -part.shape[1] % CHUNK:
            part = torch.cat([part, zeros[:, group, None].expand(-1, missing, -1)], 1)
        parts.append(_packed(part, width))
        start = end
    return Blocked(
        codes=torch.cat(parts, 1),
        scales=scales,
        zeros=zeros,
        spans=spans,
        bias=weight.bias,
        bits=weight.bits,
        width=width,
        inputs=weight.inputs,
        columns=weight.outputs,
    )


def unblocked(weight: Blocked) -> Quantized:
    """The plain tensors again."""
    ends, group = weight.spans.long().unbind(1)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    parts, first = list[Tensor](), 0
    for size in sizes.tolist():
        filled = size + -size % CHUNK
        last = first + filled * COLUMNS * weight.width // 8
        parts.append(_unpacked(weight.codes[:, first:last], weight.width)[:, :size])
        first = last
    return Quantized(
        _side_by_side(torch.cat(parts, 1), weight.columns),
        _side_by_side(weight.scales, weight.columns),
        _side_by_side(weight.zeros, weight.columns),
        group.repeat_interleave(sizes).to(torch.int32),
        weight.bits,
        weight.bias,
    )


def _packed(codes: Tensor, width: int) -> Tensor:
    """[panels, inputs, COLUMNS] -> bytes [panels, inputs * COLUMNS * width / 8]"""
    per_byte, by_column = 8 // width, codes.transpose(1, 2)
    fields = by_column.reshape(len(codes), COLUMNS, -1, per_byte, CHUNK // per_byte)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).view(-1, 1)
    return (fields << shifts).sum(-2, dtype=torch.uint8).flatten(1)


def _unpacked(packed: Tensor, width: int) -> Tensor:
    per_byte = 8 // width
    fields = packed.view(len(packed), COLUMNS, -1, 1, CHUNK // per_byte)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).view(-1, 1)
    return (fields >> shifts & (1 << width) - 1).flatten(2).transpose(1, 2)


def _in_panels(rows: Tensor) -> Tensor:
    """[n, columns] -> [panels, n, COLUMNS]"""
    wide = F.pad(rows, (0, -rows.shape[1] % COLUMNS))
    return wide.view(len(rows), -1, COLUMNS).transpose(0, 1).contiguous()


def _side_by_side(panels: Tensor, columns: int) -> Tensor:
    return panels.transpose(0, 1).reshape(panels.shape[1], -1)[:, :columns]


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
