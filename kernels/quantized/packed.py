"""The layout of quantized weights that the Triton kernels read.

Inputs are cut into chunks of CHUNK rows. A 32-bit word holds 32 / bits values of one output, in pairs: pair p has its
low value at bit bits * p and its high value at bit 16 + bits * p. Four words (index l) belong to the four threads that
share a row of a tensor-core tile; the words of one l are adjacent, so that a thread loads them at once. words:
[chunks, outputs, 4 * B], B = CHUNK * bits / 128. With s = b * pairs + p, the input of pair p of word (l, b) is

    8 s + 2 l + {0, 1}                               where a thread holds two inputs at a time (Hopper's wgmma)
    16 (s // 2) + 4 l + 2 (s % 2) + {0, 1}           where it holds four (mma.sync), `quads`

A chunk's rows belong to one group. Where groups are ragged, each is filled up to whole chunks of 32 rows with weights
of zero; `pieces` says which inputs a chunk has, and `rows` which input each row multiplies. Each chunk then has scales
and zeros of its own, where a kernel finds them without asking for the group first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from tpshard.kernels.quantized.quantized import Quantized


@dataclass(frozen=True)
class Packed:
    """A quantized weight packed for the Triton kernels.

    words: int32 [chunks, columns, chunk * width / 32]. scales: fp16 [groups, columns]. zeros: uint8 [groups, columns],
    or None where all are 2**(bits - 1). Chunk c belongs to group (c + first_chunk) // group_chunks. pieces: int32
    [2, chunks] where groups were ragged, each chunk's first input and number of inputs, with rows: int64 [chunks *
    chunk]; else None. bias: [columns] or None. width: bits of a field in `words` (3-bit codes use 4).
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    pieces: Tensor | None
    bias: Tensor | None
    bits: int
    width: int
    inputs: int
    chunk: int
    group_chunks: int = 1
    first_chunk: int = 0
    quads: bool = False
    rows: Tensor | None = None

    @property
    def columns(self) -> int:
        """Number of outputs."""
        return self.words.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        held = (self.words, self.scales, self.zeros, self.pieces, self.rows, self.bias)
        return sum(t.nbytes for t in held if t is not None)


def width_of(bits: int) -> int:
    """Bits of a field in a packed word: 3-bit codes use 4, others their own width."""
    return 4 if bits == 3 else bits


def ragged_chunk(width: int) -> int:
    """Rows of a chunk of ragged groups: the fewest, and no fewer than a product of the tensor cores takes twice."""
    return max(32, 128 // width)


def pack(weight: Quantized, quads: bool = False) -> Packed:
    """The kernels' layout of a linear whose rows are sorted by group (`weight.take_rows(weight.order())` sorts them).

    Groups that begin and end at multiples of 128, 64 or 32 rows are chunks as they are, others are filled up. Raises
    ValueError where the rows of a group are not adjacent.
    """
    if not weight.sorted:
        raise ValueError("Rows of a group must be adjacent: sort them first, and reorder the inputs alike.")
    width = width_of(weight.bits)
    smallest = 128 // width  # four words of one output
    chunk, group_chunks, first_chunk = _regular(weight.group, smallest)
    codes, scales, zeros, pieces, rows = weight.codes, weight.scales, weight.zeros, None, None
    if not chunk:
        chunk = ragged_chunk(width)
        pieces, group = _pieces(weight.group, chunk)
        rows = pieces[0, :, None].long() + torch.arange(chunk, device=pieces.device)
        rows = rows.flatten().clamp(max=weight.inputs - 1)
        scales, zeros = scales[group], zeros[group]
        codes = torch.where(_inside(pieces, chunk).view(-1, 1), codes[rows], zeros.repeat_interleave(chunk, 0))
    return Packed(
        words=pack_words(codes, width, chunk, quads),
        scales=scales.to(torch.float16).contiguous(),
        zeros=None if weight.symmetric else zeros.contiguous(),
        pieces=pieces,
        bias=weight.bias,
        bits=weight.bits,
        width=width,
        inputs=weight.inputs,
        chunk=chunk,
        group_chunks=group_chunks,
        first_chunk=first_chunk,
        quads=quads,
        rows=rows,
    )


def _regular(group: Tensor, smallest: int) -> tuple[int, int, int]:
    """How groups divide into chunks: rows of a chunk, chunks of a group, and the first row's chunk within its group.

    The rows are 0 where groups are ragged. Otherwise all have one size; the first may lack its beginning, the last its
    end.
    """
    sizes = torch.bincount(group.long()).tolist()
    size = max(sizes[1:-1], default=max(sizes))
    whole = size if len(sizes) > 1 else -(-size // 128) * 128
    first = whole - sizes[0] if len(sizes) > 1 else 0
    if any(s != size for s in sizes[1:-1]) or sizes[-1] > whole or first < 0:
        return 0, 1, 0
    for chunk in (128, 64, 32):
        if chunk >= smallest and whole % chunk == 0 and first % chunk == 0:
            return chunk, whole // chunk, first // chunk
    return 0, 1, 0


def _pieces(group: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """`Packed.pieces` of rows sorted by group, where every group begins a chunk, and the chunks' groups."""
    sizes = torch.bincount(group.long())
    chunks = (sizes + chunk - 1) // chunk
    of_chunk = torch.repeat_interleave(chunks)
    before = (torch.arange(len(of_chunk), device=group.device) - (chunks.cumsum(0) - chunks)[of_chunk]) * chunk
    begin = (sizes.cumsum(0) - sizes)[of_chunk] + before
    return torch.stack([begin, (sizes[of_chunk] - before).clamp(max=chunk)]).to(torch.int32), of_chunk


def _inside(pieces: Tensor, chunk: int) -> Tensor:
    """Which rows of each chunk are inputs, and no filling: bool [chunks, chunk]."""
    return torch.arange(chunk, device=pieces.device) < pieces[1, :, None]


def pack_words(codes: Tensor, width: int, chunk: int, quads: bool) -> Tensor:
    """Packs codes uint8 [inputs, outputs], padded with 0, into words int32 [chunks, outputs, chunk * width / 32]."""
    inputs, outputs = codes.shape
    chunks = -(-inputs // chunk)
    pairs, words = 16 // width, chunk * width // 128
    if inputs % chunk:
        codes = torch.cat([codes, codes.new_zeros(chunks * chunk - inputs, outputs)])
    if quads:
        tile = codes.view(chunks, words, pairs // 2, 4, 2, 2, outputs).permute(0, 6, 3, 1, 2, 4, 5)
    else:
        tile = codes.view(chunks, words, pairs, 4, 2, outputs).permute(0, 5, 3, 1, 2, 4)
    fields = tile.reshape(chunks, outputs, 4 * words, pairs, 2)
    packed = torch.zeros(fields.shape[:3], dtype=torch.int32, device=codes.device)
    for pair in range(pairs):
        for half in range(2):
            packed |= fields[..., pair, half].to(torch.int32) << (width * pair + 16 * half)
    return packed


def unpack_words(packed: Packed) -> Tensor:
    """Unpacks the words into codes uint8 [inputs, columns]: the inverse of `pack_words`."""
    chunks, outputs, _ = packed.words.shape
    pairs, words = 16 // packed.width, packed.chunk * packed.width // 128
    mask = (1 << packed.width) - 1
    fields = torch.stack(
        [packed.words >> (packed.width * pair + 16 * half) & mask for pair in range(pairs) for half in range(2)], -1
    ).to(torch.uint8)
    if packed.quads:
        tile = fields.view(chunks, outputs, 4, words, pairs // 2, 2, 2).permute(0, 3, 4, 2, 5, 6, 1)
    else:
        tile = fields.view(chunks, outputs, 4, words, pairs, 2).permute(0, 3, 4, 2, 5, 1)
    rows = tile.reshape(chunks * packed.chunk, outputs)
    return rows[: packed.inputs] if packed.pieces is None else rows[_inside(packed.pieces, packed.chunk).flatten()]


def groups_of(packed: Packed) -> Tensor:
    """The group of every input row, int32 [inputs]; of ragged groups the chunk."""
    if packed.pieces is not None:
        return torch.repeat_interleave(packed.pieces[1]).to(torch.int32)
    chunk = torch.arange(packed.inputs, device=packed.words.device) // packed.chunk
    return ((chunk + packed.first_chunk) // packed.group_chunks).to(torch.int32)


def unpack(packed: Packed) -> Quantized:
    """The quantized weight that was packed: the inverse of `pack`, used to check the kernels."""
    zeros = packed.zeros
    if zeros is None:
        zeros = torch.full_like(packed.scales, 1 << (packed.bits - 1)).to(torch.uint8)
    return Quantized(unpack_words(packed), packed.scales, zeros, groups_of(packed), packed.bits, packed.bias)
