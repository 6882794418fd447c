"""Attention on CUDA: torch's FlashAttention where it applies; a kernel of our own for softcaps, a window's parts,
documents out of order and odd head sizes; matrix products over blocks of queries in fp32 and fp64."""

from __future__ import annotations

from torch import Tensor
from tpshard.kernels.attention import attention_blocks, flash
from tpshard.kernels.attention.attention_mask import CausalMask


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: CausalMask, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The output [b,s,h,d] and logsumexps [b,h,s] of attention from q [b,s,h,d] to k and v [b,t,kv,d]."""
    if softcap is None and (call := flash.call_of(q, mask)) is not None:
        return flash.forward(q, k, v, call, scale)
    if flash.in_half(q):
        from tpshard.kernels.attention import triton_flash  # needs Triton, which CPU builds of torch lack

        return triton_flash.forward(q, k, v, mask, scale, softcap)
    return attention_blocks.forward(q, k, v, mask, scale, softcap)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: CausalMask, scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v, from the output and logsumexps over all keys."""
    if softcap is None and (call := flash.call_of(q, mask)) is not None:
        return flash.backward(dout, q, k, v, out, lse, call, scale)
    if flash.in_half(q):
        from tpshard.kernels.attention import triton_flash

        return triton_flash.backward(dout, q, k, v, out, lse, mask, scale, softcap)
    return attention_blocks.backward(dout, q, k, v, out, lse, mask, scale, softcap)
