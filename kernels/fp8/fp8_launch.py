"""Launching the Triton kernels of fp8 products."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from tpshard.kernels.fp8 import triton_fp8
from tpshard.kernels.fp8.fp8_blocks import BLOCK, SMALLEST
from tpshard.kernels.triton_device import capability_of

QUANTIZE_ROWS = 32


def tile(capability: tuple[int, int]) -> dict[str, int]:
    """The tile of `multiply_kernel` on a GPU. Before 9.0 sums are in registers, which hold half as many."""
    return {"BLOCK_M": 128 if capability >= (9, 0) else 64, "BLOCK_N": 128, "GROUP": 8}


def by_library(m: int, n: int, k: int, device: torch.device) -> bool:
    """Whether cuBLAS multiplies [m, k] and [n, k] with a scale for each block of 128: on Hopper from CUDA 12.9 on."""
    version = tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))
    fits = m % 16 == n % 16 == 0 and k > BLOCK  # one block would be taken for a scale per row
    return fits and version >= (12, 9) and torch.cuda.get_device_capability(device) == (9, 0)


def quantize(x: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Quantizes a contiguous x to fp8 with a scale per block (`tpshard::fp8_quantize`) in Triton."""
    m, k = x.shape[::-1] if transposed else x.shape
    values = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(k // BLOCK, m, dtype=torch.float32, device=x.device)
    strides = (1, m) if transposed else (k, 1)
    triton_fp8.quantize_kernel[(triton.cdiv(m, QUANTIZE_ROWS), k // BLOCK)](
        x, values, scales, m, *strides, k, SMALLEST=SMALLEST, BLOCK_M=QUANTIZE_ROWS, num_warps=4
    )
    return values, scales


def multiply(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplies two matrices quantized by `quantize` (`tpshard::fp8_multiply`), by the library where it can."""
    (m, k), n = a.shape, b.shape[0]
    if a.is_cuda and by_library(m, n, k, a.device):
        return torch._scaled_mm(a, b.t(), a_scales.t(), b_scales, out_dtype=dtype)
    out = torch.empty(m, n, dtype=dtype, device=a.device)
    shape = tile(capability_of(a))
    tiles = triton.cdiv(m, shape["BLOCK_M"]) * triton.cdiv(n, shape["BLOCK_N"])
    triton_fp8.multiply_kernel[(tiles,)](a, a_scales, b, b_scales, out, m, n, k, num_warps=8, num_stages=3, **shape)
    return out
