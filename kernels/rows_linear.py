"""A linear layer whose rows do not know of each other: a row's result has the same bits in every batch.

    tpshard::rows_linear(x [r,k], w [n,k], b [n] | None) -> [r,n]
    tpshard::packed_rows_linear(x [r,k], packed, b [n] | None, n) -> [r,n]

Matrix libraries choose kernels, and with them the order of sums, by the number of rows. Here every product has `TILE`
rows, so that the order is one and the same; rows come in multiples of it. Weights that the CPU's library has packed for
that shape take more rows at once where a probe finds that this changes no bit.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

TILE = 8
"""Rows of one product: the batch at which a CPU is still bound by reading the weights."""
_WIDER = (64, 32, 16)

_library = torch.library.Library("tpshard", "FRAGMENT")
_library.define("rows_linear(Tensor x, Tensor w, Tensor? b) -> Tensor")
_library.define("packed_rows_linear(Tensor x, Tensor packed, Tensor? b, int n) -> Tensor")


def can_pack(w: Tensor) -> bool:
    """Whether this torch has a packed form for the weight: fp32 or bf16 on a CPU with oneDNN."""
    if w.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return w.dtype == torch.float32 or (w.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(w: Tensor) -> Tensor:
    """w: [n, k] -> an opaque tensor for `packed_rows_linear`, about as large as w, which it replaces."""
    return torch.ops.mkldnn._reorder_linear_weight(w.contiguous(), TILE)


def _whole(x: Tensor) -> Tensor:
    if x.shape[0] % TILE:
        raise ValueError(f"rows_linear: {x.shape[0]} rows are not a multiple of {TILE}")
    return x.contiguous()


def _rows_linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    x, turned = _whole(x), w.t()
    out = x.new_empty(x.shape[0], w.shape[0])
    for start in range(0, x.shape[0], TILE):
        torch.mm(x[start : start + TILE], turned, out=out[start : start + TILE])
    return out if b is None else out.add_(b)


def _product(x: Tensor, packed: Tensor, b: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, b, "none", [], "")


def _packed_rows_linear(x: Tensor, packed: Tensor, b: Tensor | None, n: int) -> Tensor:
    x = _whole(x)
    rows = x.shape[0]
    if rows == TILE:
        return _product(x, packed, b)
    out = x.new_empty(rows, n)
    start = 0
    for tile in (*_same_bits(n, x.shape[1], x.dtype, torch.get_num_threads()), TILE):
        while rows - start >= tile:
            out[start : start + tile] = _product(x[start : start + tile], packed, b)
            start += tile
    return out


@lru_cache(maxsize=256)
def _same_bits(n: int, k: int, dtype: torch.dtype, threads: int) -> tuple[int, ...]:
    """The wider tiles whose rows have the same bits as those of `TILE`, widest first. The order of sums does not depend
    on the data, so equal bits for thousands of random sums say that it is the same; bf16 is rounded too far to show."""
    if dtype != torch.float32:
        return ()
    generator = torch.Generator().manual_seed(0)
    packed = pack(torch.randn(n, k, generator=generator).to(dtype))
    x = torch.randn(_WIDER[0], k, generator=generator).to(dtype)
    narrow = torch.cat([_product(part, packed, None) for part in x.split(TILE)])
    return tuple(tile for tile in _WIDER if torch.equal(_product(x[:tile], packed, None), narrow[:tile]))


_library.impl("rows_linear", _rows_linear, "CompositeExplicitAutograd")
_library.impl("packed_rows_linear", _packed_rows_linear, "MkldnnCPU")  # a packed weight is an opaque mkldnn tensor


@torch.library.register_fake("tpshard::rows_linear", lib=_library)
def _(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


@torch.library.register_fake("tpshard::packed_rows_linear", lib=_library)
def _(x: Tensor, packed: Tensor, b: Tensor | None, n: int) -> Tensor:
    return x.new_empty(x.shape[0], n)
