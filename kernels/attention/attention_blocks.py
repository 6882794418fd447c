"""Attention by matrix products over blocks of queries: the reference, in fp32 or fp64, for any device and dtype.

A query that attends to none of the keys has output 0 and logsumexp -inf.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from tpshard.kernels.attention.attention_mask import CausalMask, cap, slopes
from tpshard.kernels.dtypes import wide_dtype

_BLOCK = 512
"""Query rows scored at once, which needs b * h * _BLOCK * t floats of memory."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: CausalMask, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The output [b,s,h,d] and logsumexps [b,h,s] of attention from q [b,s,h,d] to k and v [b,t,kv,d]."""
    (b, s, h, _), kv = q.shape, k.shape[2]
    queries, keys, values = _by_head(q, kv) * scale, _by_head(k, kv), _by_head(v, kv)
    out, lse = torch.zeros_like(q), torch.full((b, h, s), -torch.inf, dtype=wide_dtype(q), device=q.device)
    for rows, part, visible in _blocks(mask, q.device):
        scores = cap(queries[..., rows, :] @ keys[..., part, :].transpose(-1, -2), softcap)
        row_lse = scores.masked_fill_(~visible, -torch.inf).logsumexp(-1)
        probabilities = scores.sub_(row_lse.unsqueeze(-1)).exp_().masked_fill_(~visible, 0)
        out[:, rows] = (probabilities @ values[..., part, :]).permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
        lse[..., rows] = row_lse.flatten(1, 2)
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: CausalMask, scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, and of k and v in fp32 or fp64, from the output and logsumexps over all keys.

    Source: Dao et al. 2022, algorithm 4.
    """
    kv = k.shape[2]
    queries, keys, values = _by_head(q, kv), _by_head(k, kv), _by_head(v, kv)
    grad, logs = _by_head(dout, kv), lse.unflatten(1, (kv, -1)).unsqueeze(-1)
    mean = (grad * _by_head(out, kv)).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    for rows, part, visible in _blocks(mask, q.device):
        block, dblock = queries[..., rows, :], grad[..., rows, :]
        scores = cap((block * scale) @ keys[..., part, :].transpose(-1, -2), softcap)
        slope = slopes(scores, softcap)
        probabilities = scores.sub_(logs[..., rows, :]).exp_().masked_fill_(~visible, 0)
        dscores = dblock @ values[..., part, :].transpose(-1, -2)
        dscores.sub_(mean[..., rows, :]).mul_(probabilities).mul_(slope * scale)
        dq[:, rows] = (dscores @ keys[..., part, :]).permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
        dk[..., part, :] += (dscores.transpose(-1, -2) @ block).sum(2, keepdim=True)
        dv[..., part, :] += (probabilities.transpose(-1, -2) @ dblock).sum(2, keepdim=True)
    return dq, dk.squeeze(2).transpose(1, 2).contiguous(), dv.squeeze(2).transpose(1, 2).contiguous()


def _by_head(x: Tensor, kv: int) -> Tensor:
    """[b,s,h,d] with the heads that share a KV head in a dim of their own, in fp32 or fp64: [b,kv,h/kv,s,d]."""
    return x.unflatten(2, (kv, -1)).permute(0, 2, 3, 1, 4).to(wide_dtype(x))


def _blocks(mask: CausalMask, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
    """Each block of queries, with the keys that any of them attends to and the mask [b or 1, 1, 1, rows, keys]."""
    for start in range(0, len(mask.queries), _BLOCK):
        rows = slice(start, min(start + _BLOCK, len(mask.queries)))
        positions = mask.queries[rows]
        earliest = mask.keys.start if mask.window is None else max(mask.keys.start, positions.start - mask.window + 1)
        keys = range(earliest, min(mask.keys.stop, positions.stop))
        if not keys:
            continue
        part = slice(keys.start - mask.keys.start, keys.stop - mask.keys.start)
        yield rows, part, mask.of(rows, part, device).unsqueeze(1)
