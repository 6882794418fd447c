"""Products with quantized weights, each by the fastest path of its device.

    quantized_linear(x [..., inputs], weight) -> [..., columns]
    quantized_gate(x [..., inputs], gate and up side by side) -> silu(x @ gate) * (x @ up)   [..., columns / 2]

On CUDA the tile, or dequantize-and-multiply, is measured at first use (fp32 always dequantizes); with `invariant` a
row's bits do not depend on the others. A CPU has torch's int4 product for weights of up to 4 bits in bf16 (see
`kernels.int4`), in which they never do.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from tpshard.kernels import int4
from tpshard.kernels.int4 import Int4
from tpshard.kernels.packed import Packed, pack
from tpshard.kernels.quantized import Quantized

Prepared = Packed | Int4
"""A weight as a GPU or a CPU multiplies by it."""


def multiplies(bits: int, dtype: torch.dtype, kind: str) -> bool:
    """Whether a `cpu` or `gpu` multiplies weights of so many bits, in a dtype, as codes; else they are made dense."""
    return kind == "gpu" or (dtype == torch.bfloat16 and bits in int4.BITS)


def prepare(weight: Quantized, device: torch.device | str) -> Prepared:
    """The form in which `device` multiplies. Raises ValueError where rows of a group are apart."""
    held = weight.to(device)
    if held.codes.is_cuda:
        return pack(held, quads=torch.cuda.get_device_capability(held.codes.device) < (9, 0))
    return int4.pack(held)


def quantized_linear(x: Tensor, weight: Packed, invariant: bool) -> Tensor:
    """x [..., inputs] -> [..., columns] in x's dtype, on CUDA."""
    return _product(x, weight, False, invariant)


def quantized_gate(x: Tensor, weight: Packed, invariant: bool) -> Tensor:
    """silu(gate) * up [..., columns / 2], with `weight` holding gate and up side by side, on CUDA."""
    return _product(x, weight, True, invariant)


def _product(x: Tensor, weight: Packed, gated: bool, invariant: bool) -> Tensor:
    from tpshard.kernels import triton_launch  # needs Triton, which a CPU's torch comes without

    rows = x.reshape(-1, weight.inputs).contiguous()
    with torch.cuda.device(x.device):
        if x.dtype == torch.float32:
            tile = None
        elif invariant:
            tile = triton_launch.tiles(1, weight, gated, 132)[0]  # the same sums in the same order for every batch
        else:
            tile = _choice().tile(rows, weight, gated)
        if tile is None:
            y = triton_launch.dense_matmul(rows, weight, gated)
        else:
            y = triton_launch.matmul(rows, weight, gated, tile)
    return y.view(*x.shape[:-1], y.shape[-1])


@cache
def _choice() -> Any:
    from tpshard.kernels.triton_launch import TileChoice

    return TileChoice()
