"""Linear layers: the library's, and one whose rows are computed independently of the batch.

Matrix libraries choose kernels, and so the order of sums, by the number of rows. `fixed_rows_linear` multiplies `TILE`
rows at a time, so that a row's result has the same bits in every batch. With weights packed by the CPU's library it
multiplies more rows at once where a probe shows that this changes no bit, and with plain ones fewer where a row's bits
would depend on its place among `TILE` rows (MKL for AVX2 multiplies six of them in one way and two in another).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 8
"""Rows of one product. On a CPU a batch of 8 is still bound by reading the weights."""
_WIDER = (64, 32, 16)
_NARROWER = (4, 2, 1)
_MOST_PROBED = 2**22
"""Numbers in the weight of a probe of plain products: libraries choose their kernels by sizes smaller than that."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., k] @ weight [n, k].T -> [..., n], by torch's linear."""
    return F.linear(x, weight)


def fixed_rows_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`linear` as products of TILE rows each; `weight` may be packed by `pack`."""
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if count % TILE:
        rows = F.pad(rows, (0, 0, 0, -count % TILE))
    out = _packed_product(rows, weight) if weight.is_mkldnn else _plain(rows, weight)
    return out[:count].view(*x.shape[:-1], out.shape[-1])


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU library can pack weights of a dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor) -> Tensor:
    """A CPU weight [n, k] as an opaque tensor for `fixed_rows_linear`, about as large as the weight that it
    replaces."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TILE)


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    (n, k), tile = weight.shape, TILE
    if not x.is_cuda:
        tile = _plain_tile(min(n, max(TILE, _MOST_PROBED // max(1, k))), k, x.dtype, torch.get_num_threads())
    return _in_tiles(x.contiguous(), weight.t(), tile)


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


def _product(x: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _packed_product(x: Tensor, packed: Tensor) -> Tensor:
    x, rows = x.contiguous(), x.shape[0]
    if rows == TILE:
        return _product(x, packed)
    out = x.new_empty(rows, packed.shape[0])
    start = 0
    for tile in (*_same_bits(packed.shape[0], x.shape[1], x.dtype, torch.get_num_threads()), TILE):
        while rows - start >= tile:
            out[start : start + tile] = _product(x[start : start + tile], packed)
            start += tile
    return out


@lru_cache(maxsize=256)
def _same_bits(n: int, k: int, dtype: torch.dtype, threads: int) -> tuple[int, ...]:
    """The wider tiles whose rows have the same bits as those of `TILE`, widest first.

    The order of sums does not depend on the data, so equal bits of thousands of random sums show that it is the same.
    bf16 results are rounded too coarsely to show it.
    """
    if dtype != torch.float32:
        return ()
    generator = torch.Generator().manual_seed(0)
    packed = pack(torch.randn(n, k, generator=generator).to(dtype))
    x = torch.randn(_WIDER[0], k, generator=generator).to(dtype)
    narrow = torch.cat([_product(part, packed) for part in x.split(TILE)])
    return tuple(tile for tile in _WIDER if torch.equal(_product(x[:tile], packed), narrow[:tile]))
