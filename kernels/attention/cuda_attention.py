"""Attention on CUDA: torch's FlashAttention where it applies, else matrix products over blocks of queries (fp32, odd
head sizes, softcaps, document ids out of order, a window's parts)."""

from __future__ import annotations

from torch import Tensor
from tpshard.kernels.attention import attention_blocks, flash
from tpshard.kernels.attention.attention_mask import CausalMask


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: CausalMask, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The output [b,s,h,d] and logsumexps [b,h,s] of attention from q [b,s,h,d] to k and v [b,t,kv,d]."""
    call = flash.call_of(q, mask) if softcap is None else None
    if call is None:
        return attention_blocks.forward(q, k, v, mask, scale, softcap)
    return flash.forward(q, k, v, call, scale)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: CausalMask, scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v, from the output and logsumexps over all keys."""
    call = flash.call_of(q, mask) if softcap is None else None
    if call is None:
        return attention_blocks.backward(dout, q, k, v, out, lse, mask, scale, softcap)
    return flash.backward(dout, q, k, v, out, lse, call, scale)
