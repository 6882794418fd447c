"""What a step does to its rows between products, on a CPU: LLVM's programs, plain torch where there is none."""

from __future__ import annotations

import struct
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels import llvm_launch
from tpshard.kernels.llvm_rows import LANES, STEP


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [1, rows, heads, dim], cos and sin [1, rows, 1, dim] -> x * cos + roll(x, dim / 2) * sin, as models.rope does.

    Bit for bit what torch gives.
    """
    dim = x.shape[-1]
    if not _known(x, cos, sin) or dim % (2 * LANES) or cos.shape != (1, x.shape[1], 1, dim) or x.shape[0] != 1:
        return x * cos + torch.roll(x, dim // 2, -1) * sin
    out = torch.empty_like(x)
    llvm_launch.rows(
        "rotate", x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), *x.shape[1:], elements=x.numel()
    )  # fmt: skip
    return out


def gate(x: Tensor, up: Tensor) -> Tensor:
    """x, up [..., width] -> silu(x) * up. Where LANES divides the width, a row's bits do not depend on the others."""
    width = x.shape[-1]
    if not _known(x, up) or width % LANES or x.shape != up.shape:
        return F.silu(x) * up
    out, rows = torch.empty_like(x), x.numel() // width
    llvm_launch.rows("gate", x.data_ptr(), up.data_ptr(), out.data_ptr(), rows, width, elements=4 * x.numel())
    return out


def rms_norm(x: Tensor, weight: Tensor, order: Tensor | None, eps: float) -> Tensor:
    """rms_norm_permuted on a CPU. A row's bits do not depend on the others."""
    width = x.shape[-1]
    if not _known(x, weight) or width % STEP or weight.shape != (width,):
        return rms_norm_reference(x, weight, order, eps)
    out, rows = torch.empty_like(x), x.numel() // width
    llvm_launch.rows(
        "rms_norm", x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, _bits(eps), elements=x.numel()
    )  # fmt: skip
    return out if order is None else out.index_select(-1, order)


def rms_norm_reference(x: Tensor, weight: Tensor, order: Tensor | None, eps: float) -> Tensor:
    """What `triton_norm.rms_norm_kernel` computes, in plain operations."""
    wide = x.float()
    normed = (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)
    return normed if order is None else normed.index_select(-1, order)


def _known(*tensors: Tensor) -> bool:
    return llvm_launch.available() and all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


@cache
def _bits(value: float) -> int:
    """A float's 32 bits."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)
