"""Matrix products with quantized weights, by the fastest path of the device.

    quantized_linear(x [..., inputs], weight) -> [..., columns]
    quantized_gate(x [..., inputs], gate and up side by side) -> silu(x @ gate) * (x @ up)   [..., columns / 2]

On CUDA the tile, or dequantize-and-multiply, is chosen by measuring at first use; fp32 always dequantizes. With
`invariant` a row's bits do not depend on the other rows. On a CPU, bf16 with weights of up to 4 bits uses torch's int4
product (see `kernels.int4`), whose rows are always independent.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from tpshard.kernels.quantized import int4
from tpshard.kernels.quantized.int4 import Int4
from tpshard.kernels.quantized.packed import Packed, pack
from tpshard.kernels.quantized.quantized import Quantized
from tpshard.kernels.triton_device import capability_of

Prepared = Packed | Int4
"""A weight packed for a GPU or for a CPU."""


def multiplies(bits: int, dtype: torch.dtype, kind: str) -> bool:
    """Whether a device of this kind (`cpu` or `gpu`) multiplies quantized weights without making them dense first."""
    return kind == "gpu" or (dtype == torch.bfloat16 and bits in int4.BITS)


def prepare(weight: Quantized, device: torch.device | str) -> Prepared:
    """The weight packed for `device`. Raises ValueError where the rows of a group are not adjacent."""
    held = weight.to(device)
    if held.codes.is_cuda:
        return pack(held, quads=capability_of(held.codes) < (9, 0))
    return int4.pack(held)


def quantized_linear(x: Tensor, weight: Packed, invariant: bool) -> Tensor:
    """The product x [..., inputs] -> [..., columns] in x's dtype, on CUDA."""
    return _product(x, weight, False, invariant)


def quantized_gate(x: Tensor, weight: Packed, invariant: bool) -> Tensor:
    """silu(gate) * up [..., columns / 2], with `weight` holding gate and up side by side, on CUDA."""
    return _product(x, weight, True, invariant)


def _product(x: Tensor, weight: Packed, gated: bool, invariant: bool) -> Tensor:
    from tpshard.kernels import triton_launch  # needs Triton, which CPU builds of torch lack

    rows = x.reshape(-1, weight.inputs).contiguous()
    with torch.cuda.device(x.device):
        if x.dtype == torch.float32:
            tile = None
        elif invariant:
            # the same order of sums for every batch
            tile = triton_launch.tiles(1, weight, gated, 132, capability_of(x))[0]
        else:
            tile = _choice().tile(rows, weight, gated)
        if tile is None:
            y = triton_launch.dense_matmul(rows, weight, gated, fixed_rows=invariant)
        else:
            y = triton_launch.matmul(rows, weight, gated, tile)
    return y.view(*x.shape[:-1], y.shape[-1])


@cache
def _choice() -> Any:
    from tpshard.kernels.triton_launch import TileChoice

    return TileChoice()
