"""Linear layers: the library's, and one whose rows are computed independently of the batch.

Matrix libraries choose kernels, and so the order of sums, by the number of rows. `fixed_rows_linear` multiplies `TILE`
rows at a time, so that a row's result has the same bits in every batch. With weights packed by the CPU's library it
multiplies fewer or more rows at once where a probe shows that this changes no bit, one alone in a faster way (see
`kernels.one_row`), and with plain ones fewer where a row's bits would depend on its place among `TILE` rows (MKL for
AVX2 multiplies six of them in one way and two in another).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels import one_row

TILE = 8
"""Rows of one product with plain weights, and those with whose bits a probe compares other numbers of rows."""
TILES = (128, 96, 64, 48, 32, 24, 16, 8, 4, 2, 1)
"""Rows of one product with packed weights, as far as they change no bit."""
_NARROWER = (4, 2, 1)
_MOST_PROBED = 2**22
"""Numbers in the weight of a probe of plain products: libraries choose their kernels by sizes smaller than that."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., k] @ weight [n, k].T -> [..., n], by torch's linear."""
    return F.linear(x, weight)


def fixed_rows_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`linear` as products of fixed numbers of rows; `weight` may be packed by `pack`, in a wider dtype than x."""
    if not weight.is_mkldnn:
        out = _plain(x.reshape(-1, x.shape[-1]), weight)
        return out.view(*x.shape[:-1], out.shape[-1])
    k = x.shape[-1]
    probe, rows = probed(weight.shape[0], k, weight.dtype, torch.get_num_threads()), x.numel() // k
    if rows == 1 and probe.summed:
        return one_row.product(x.to(weight.dtype), weight, probe.summed).to(x.dtype)
    if rows in probe.tiles:  # all dims at once, without views: at one row an operation takes as long as some products
        return product(x.to(weight.dtype), weight).to(x.dtype)
    out = product_in_tiles(x.reshape(rows, k).to(weight.dtype), weight, probe.tiles).to(x.dtype)
    return out.view(*x.shape[:-1], out.shape[-1])


def packed_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype in which this machine's CPU library packs and multiplies weights of a dtype; None if it cannot.

    Half precision becomes fp32 on a CPU without instructions for bf16: there a product of several rows takes several
    times as long in bf16.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16) or not torch.backends.mkldnn.is_available():
        return None
    return dtype if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def pack(weight: Tensor) -> Tensor:
    """A CPU weight [n, k] as an opaque tensor of `packed_dtype` for `fixed_rows_linear`, about as large as the weight
    in that dtype."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.to(packed_dtype(weight.dtype)).contiguous(), TILE)


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    (n, k), tile = weight.shape, TILE
    if not x.is_cuda:
        tile = _plain_tile(min(n, max(TILE, _MOST_PROBED // max(1, k))), k, x.dtype, torch.get_num_threads())
    count = x.shape[0]
    return _in_tiles(F.pad(x, (0, 0, 0, -count % TILE)).contiguous(), weight.t(), tile)[:count]


def _in_tiles(x: Tensor, turned: Tensor, tile: int) -> Tensor:
    out = x.new_empty(x.shape[0], turned.shape[1])
    for start in range(0, x.shape[0], tile):
        torch.mm(x[start : start + tile], turned, out=out[start : start + tile])
    return out


@lru_cache(maxsize=256)
def _plain_tile(n: int, k: int, dtype: torch.dtype, threads: int) -> int:
    """The largest tile of plain products, up to `TILE`, whose rows have the same bits at every place."""
    generator = torch.Generator().manual_seed(0)
    turned = torch.randn(n, k, generator=generator).to(dtype).t()
    x = torch.randn(TILE, k, generator=generator).to(dtype)

    def place_is_free(tile: int) -> bool:
        out = _in_tiles(x, turned, tile)
        return all(torch.equal(_in_tiles(x.roll(by, 0), turned, tile), out.roll(by, 0)) for by in range(1, TILE))

    return next((tile for tile in (TILE, *_NARROWER) if place_is_free(tile)), 1)


def product(x: Tensor, packed: Tensor) -> Tensor:
    """x [..., k] @ packed [n, k].T, of one dtype, in one operation of the CPU's library."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def product_in_tiles(x: Tensor, packed: Tensor, tiles: Sequence[int]) -> Tensor:
    """`product` of these numbers of rows at a time, largest first."""
    x, rows = x.contiguous(), x.shape[0]
    if rows in tiles:
        return product(x, packed)
    out = x.new_empty(rows, packed.shape[0])
    start = 0
    for tile in tiles:
        while rows - start >= tile:
            out[start : start + tile] = product(x[start : start + tile], packed)
            start += tile
    if start < rows:
        tail = F.pad(x[start:], (0, 0, 0, tiles[-1] - (rows - start)))
        out[start:] = product(tail, packed)[: rows - start]
    return out


class Probe(NamedTuple):
    """What has the bits of products of `TILE` rows with packed weights of one shape."""

    tiles: tuple[int, ...]
    """The numbers of rows of other products, and `TILE`; largest first."""
    summed: int
    """Inputs of a sum in `one_row.product`; 0: it has others, or is slower."""


@lru_cache(maxsize=256)
def probed(n: int, k: int, dtype: torch.dtype, threads: int) -> Probe:
    """What multiplies rows with packed weights [n, k] of a dtype on this machine.

    The order of sums does not depend on the data, so equal bits of thousands of sums show that it is the same. The
    probe's sums are zero but for rounding, which the order decides: results in bf16 show it too.
    """
    packed, x = pack(mirrored(n, k, 1.0).to(dtype)), mirrored(TILES[0], k, -1.0).to(dtype)
    expected = torch.cat([product(part, packed) for part in x.split(TILE)])
    summed = one_row.probed(packed, x[:TILE], expected[:TILE], product)
    return Probe(agreeing(x, packed, expected), summed)


def agreeing(x: Tensor, packed: Tensor, expected: Tensor) -> tuple[int, ...]:
    """The numbers of rows with which `product` gives these results, in their dtype; a few products of each are tried.

    x: [64, k].
    """
    tiles = []
    for tile in TILES:
        few = x[: max(tile, TILE)]
        result = torch.cat([product(part, packed) for part in few.split(tile)])
        if torch.equal(result.to(expected.dtype), expected[: len(few)]):
            tiles.append(tile)
    return tuple(tiles)


def mirrored(rows: int, k: int, sign: float) -> Tensor:
    """Random rows [rows, k] whose second half is the first in reverse, times `sign`; 0 in the middle if k is odd.

    A product of rows of sign 1 and -1 is zero, and its rounding depends on the order of its sums.
    """
    half = k // 2
    noise = torch.randn(max(1, min(rows * half, 65521)), generator=torch.Generator().manual_seed(k + int(sign)))
    first = noise.repeat(-(-rows * half // len(noise)))[: rows * half].view(rows, half)
    return torch.cat([first, torch.zeros(rows, k % 2), sign * first.flip(1)], 1)
