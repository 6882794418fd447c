"""A CUDA implementation of torch's CPU attention operation, by FlashAttention or products over blocks of queries.

Programs are captured on the CPU, where `torch.nn.functional.scaled_dot_product_attention` becomes an operation that
torch implements for CPUs alone. It is registered for CUDA here, with the same results: fp32 or fp64 sums, and a
logsumexp of 0 for a query that sees no key. FlashAttention computes what has no mask, in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from tpshard.kernels.attention import flash
from tpshard.kernels.attention.attention_mask import CausalMask
from tpshard.kernels.dtypes import wide_dtype

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_BLOCK = 512
"""Query rows scored at once, which needs b * h * _BLOCK * t floats of memory."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, *, attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output [b,h,s,d] and logsumexps [b,h,s] of attention from q [b,h,s,d] to k and v [b,kv,t,d].

    attn_mask: added to the scores, broadcast to [b,h,s,t]. causal: query i sees the keys up to i.
    """
    assert not dropout, "capture draws dropout by an operation of its own"
    call = _flash_call(q, k, attn_mask, causal)
    if call is not None:
        queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
        result, logs = flash.forward(queries, keys, values, call, _factor(q, scale))
        return result.transpose(1, 2), logs
    b, h, s, _ = q.shape
    out, lse = torch.empty_like(q), q.new_empty((b, s, h), dtype=wide_dtype(q)).transpose(1, 2)
    for rows, _, scores in _scores(q, k, attn_mask, causal, scale):
        row_lse = scores.logsumexp(-1, keepdim=True)
        row_lse.masked_fill_(row_lse == -math.inf, 0.0)
        shares = scores.sub_(row_lse).exp_() @ v.unsqueeze(2).to(scores.dtype)
        out[:, :, rows] = shares.flatten(1, 2).to(q.dtype)
        lse[:, :, rows] = row_lse.squeeze(-1).flatten(1, 2)
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dropout: float, causal: bool, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v, from the output and logsumexps over all keys (Dao et al. 2022, algorithm 4).

    Shapes and settings are those of `forward`; dout [b,h,s,d], and each gradient has the shape of its tensor.
    """
    assert not dropout, "capture draws dropout by an operation of its own"
    call = _flash_call(q, k, attn_mask, causal)
    if call is not None:
        grad, queries, keys, values, result = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        results = flash.backward(grad, queries, keys, values, result, lse, call, _factor(q, scale))
        return results[0].transpose(1, 2), results[1].transpose(1, 2), results[2].transpose(1, 2)
    wide, kv, factor = wide_dtype(q), k.shape[1], _factor(q, scale)
    keys, values = k.unsqueeze(2).to(wide), v.unsqueeze(2).to(wide)
    dq, dk, dv = _by_rows(q, q.dtype), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows, queries, scores in _scores(q, k, attn_mask, causal, scale):
        grad, result = (x[:, :, rows].unflatten(1, (kv, -1)).to(wide) for x in (dout, out))
        logs = lse[:, :, rows].unflatten(1, (kv, -1)).unsqueeze(-1)
        weights = scores.sub_(logs).exp_()
        dscores = grad @ values.transpose(-1, -2)
        dscores.sub_((grad * result).sum(-1, keepdim=True)).mul_(weights).mul_(factor)
        dq[:, :, rows] = (dscores @ keys).flatten(1, 2).to(q.dtype)
        dk += (dscores.transpose(-1, -2) @ queries).sum(2)
        dv += (weights.transpose(-1, -2) @ grad).sum(2)
    return dq, _by_rows(k, k.dtype).copy_(dk), _by_rows(v, v.dtype).copy_(dv)


def _flash_call(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> flash.FlashCall | None:
    """How FlashAttention computes a call; None where it does not. torch's causal queries begin where the keys begin."""
    s, t = q.shape[2], k.shape[2]
    if mask is not None or (causal and s != t):
        return None
    return flash.call_of(q, CausalMask(range(t), range(t)) if causal else CausalMask(range(t, t + s), range(t)))


def _factor(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Each block of rows, with its queries [b,kv,h/kv,rows,d] and masked scores [b,kv,h/kv,rows,t], fp32 or fp64."""
    (b, h, s, _), kv, t = q.shape, k.shape[1], k.shape[2]
    factor = _factor(q, scale)
    keys = k.unsqueeze(2).to(wide_dtype(q))
    if mask is not None:
        mask = mask.expand(b, h, s, t).unflatten(1, (kv, -1))
    positions = torch.arange(max(s, t), device=q.device)
    for start in range(0, s, _BLOCK):
        rows = slice(start, min(start + _BLOCK, s))
        queries = q[:, :, rows].unflatten(1, (kv, -1)).to(keys.dtype)
        scores = (queries * factor) @ keys.transpose(-1, -2)
        if mask is not None:
            scores += mask[..., rows, :]
        if causal:
            scores.masked_fill_(positions[:t] > positions[rows, None], -math.inf)
        yield rows, queries, scores


def _by_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor of x's shape [b,h,s,d], laid out as [b,s,h,d], as torch lays out gradients."""
    b, h, s, d = x.shape
    return x.new_empty((b, s, h, d), dtype=dtype).transpose(1, 2)


_library = torch.library.Library("aten", "IMPL")
_library.impl("_scaled_dot_product_flash_attention_for_cpu", forward, "CUDA")
_library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", backward, "CUDA")
