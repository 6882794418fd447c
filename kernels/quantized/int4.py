"""Quantized weights of up to 4 bits in the layout of torch's int4 matrix product on a CPU.

    y [rows, columns] = x [rows, inputs] @ w,    w[k, n] = scales[g, n] * (codes[k, n] - 8) + shifts[g, n]

`aten::_weight_int4pack_mm_for_cpu` is fast only in bf16: x, scales, shifts and y are rounded to bf16, sums are fp32. A
weight differs from the file's by up to 2**-9 of its value, and by up to 1/64 of a quantization step where its zero is
not the middle code. A row's bits do not depend on the other rows.

All groups of the operation have one size: 32, 64, 128 or 256 inputs. Larger groups that are multiples of one of these
are split; others are padded with inputs of 0.

The operation takes as long for each further row. For many rows, `Int4Parts` holds the same weights dense in fp32. The
operation sums in sequence, as does the CPU's library up to a number of inputs that a probe finds (512 with AVX-512,
1024 with AVX2). Products of more inputs are computed in parts, whose sums are rounded to bf16 and added in fp32; then
both forms of a weight give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels import linear
from tpshard.kernels.quantized.quantized import Quantized

BITS = (2, 3, 4)
GROUPS = (256, 128, 64, 32)
PARTS = (1024, 512, 256)
"""Inputs of a part that are tried."""
DENSE_ROWS = 32
"""Rows from which a dense product takes no longer than an int4 one."""
MULTIPLY = torch.ops.aten._weight_int4pack_mm_for_cpu.default
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
    codes, scales, take, group = _layout(weight)
    return Int4(_packed(codes), scales, take, group, weight.inputs, weight.outputs)


def _layout(weight: Quantized) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Codes of the operation, uint8 [padded columns, padded inputs], and `Int4`'s scales, take and group."""
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
    scales = F.pad(torch.stack([scale, shift], -1), (0, 0, 0, missing)).bfloat16().contiguous()
    return F.pad(codes, (0, 0, 0, missing)), scales, take if len(take) > weight.inputs else None, group


@dataclass(frozen=True)
class Int4Parts:
    """A weight cut between its inputs: int4, or dense in fp32 as the CPU's library packs it."""

    parts: tuple[Int4 | Tensor, ...]
    most: int
    """Inputs of each part but the last, which may have fewer; padding included."""
    take: Tensor | None
    """As in `Int4`, over all parts."""
    group: int
    inputs: int
    columns: int

    @property
    def nbytes(self) -> int:
        """Bytes of the parts; an opaque one takes as many as its elements."""
        return sum(p.nbytes if isinstance(p, Int4) else p.numel() * p.itemsize for p in self.parts)


def pack_parts(weight: Quantized, dense: bool) -> Int4Parts:
    """The layout for `parts_linear`, `dense` if the library multiplies such parts with the bits of int4 products.

    Raises ValueError as `pack`.
    """
    codes, scales, take, group = _layout(weight)
    columns, width = codes.shape
    most = next((most for most in PARTS if _agree(columns, width, most, group)), 0)
    parts: list[Any] = []
    for start, size in _places(width, most or width):
        own, own_scales = codes[:, start : start + size], scales[start // group : (start + size) // group].contiguous()
        if dense and most:
            parts.append(linear.pack(_values(own, own_scales, group)))
        else:
            parts.append(Int4(_packed(own), own_scales, None, group, size, columns))
    return Int4Parts(tuple(parts), most or width, take, group, weight.inputs, weight.outputs)


def parts_linear(x: Tensor, weight: Int4Parts) -> Tensor:
    """The product with a weight in parts: x bf16 [..., inputs] -> bf16 [..., columns]."""
    rows = _input_rows(x, weight)
    pieces = rows.split(weight.most, 1) if len(weight.parts) > 1 else (rows,)
    return _columns(_sum([_part(own, part, weight.group) for own, part in zip(pieces, weight.parts)]), x, weight)


def _part(rows: Tensor, part: Int4 | Tensor, group: int) -> Tensor:
    if isinstance(part, Int4):
        return _product(rows, part)
    tiles = same_bits(part.shape[0], rows.shape[1], group, torch.get_num_threads())
    return linear.product_in_tiles(rows.float(), part, tiles).bfloat16()


def _sum(ys: list[Tensor]) -> Tensor:
    """The sum of bf16 tensors, in fp32 and in their order, rounded once."""
    if len(ys) <= 2:
        return ys[0] if len(ys) == 1 else ys[0] + ys[1]  # an addition of two in bf16 is one in fp32, rounded
    total = ys[0].float()
    for y in ys[1:]:
        total += y
    return total.bfloat16()


@cache
def agrees() -> bool:
    """Whether this machine's CPU library has the bits of int4 products for some number of inputs."""
    return _agree(256, 256, 256, 128)


def _places(inputs: int, most: int) -> list[tuple[int, int]]:
    """(start, size) of parts with at most so many inputs."""
    return [(start, min(most, inputs - start)) for start in range(0, inputs, most)]


def _agree(columns: int, inputs: int, most: int, group: int) -> bool:
    """Whether dense parts of at most so many inputs have the bits of int4 ones when many rows are multiplied."""
    if linear.packed_dtype(torch.float32) is None:
        return False
    tiles = [same_bits(columns, n, group, torch.get_num_threads()) for n in {size for _, size in _places(inputs, most)}]
    return all(own and own[0] >= DENSE_ROWS for own in tiles)


@lru_cache(maxsize=256)
def same_bits(columns: int, inputs: int, group: int, threads: int) -> tuple[int, ...]:
    """The numbers of rows whose dense products of this shape have the bits of int4 ones, largest first. See
    `linear.probed`."""
    half = torch.randint(16, (columns, inputs // 2), generator=torch.Generator().manual_seed(inputs))
    codes = torch.cat([half, half.flip(1)], 1)
    steps = linear.mirrored(2 * columns, inputs // group, 1.0).T.reshape(-1, columns, 2)
    scale = (steps[..., 0] + 2).bfloat16()
    # as in `_layout`; of another shift the operation may compute other values, which it rounds otherwise
    scales = torch.stack([scale, (steps[..., 1] * 3).round().clamp(-8, 8) * scale], -1).bfloat16().contiguous()
    weight = Int4(_packed(codes), scales, None, group, inputs, columns)
    x = linear.mirrored(linear.TILES[0], inputs, -1.0).bfloat16()
    return linear.agreeing(x.float(), linear.pack(_values(codes, scales, group)), int4_linear(x, weight))


def _packed(codes: Tensor) -> Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int().contiguous(), 1)


def _values(codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """The fp32 weights [columns, inputs] that the operation computes with: scale * (code - 8) + shift, rounded once."""
    steps = codes.float().sub_(8).view(len(codes), -1, group)  # times a scale in bf16 they are exact
    scale, shift = (scales[..., i].float().T.unsqueeze(2) for i in range(2))
    return steps.mul_(scale).add_(shift).view(codes.shape)


def _input_rows(x: Tensor, weight: Int4 | Int4Parts) -> Tensor:
    """x as rows, with inputs of 0 at the places of padding."""
    rows = x.reshape(-1, weight.inputs)
    return rows if weight.take is None else F.pad(rows, (0, 1)).index_select(-1, weight.take)


def int4_linear(x: Tensor, weight: Int4) -> Tensor:
    """The product with a packed weight: x bf16 [..., inputs] -> bf16 [..., columns]."""
    return _columns(_product(_input_rows(x, weight), weight), x, weight)


def _product(rows: Tensor, weight: Int4) -> Tensor:
    return MULTIPLY(rows.contiguous(), weight.codes, weight.group, weight.scales)


def _columns(y: Tensor, x: Tensor, weight: Int4 | Int4Parts) -> Tensor:
    """The columns of the product [rows, padded columns] of x that are no padding, in x's dims."""
    y = y if y.shape[1] == weight.columns else y[:, : weight.columns]
    return y.view(*x.shape[:-1], weight.columns)
