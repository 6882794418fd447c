"""Inputs of attention, with the results of plain softmax in fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def documents_of(b: int, t: int, seed: int) -> Tensor:
    starts = torch.rand(b, t, generator=torch.Generator().manual_seed(seed)) < 0.15
    return starts.cumsum(1)


def plain_scores(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The scores [b,h,s,t], -inf where a query does not attend, and the values with a head per query head."""
    group, s, t = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    row = torch.arange(t - s, t)
    visible = torch.arange(t) <= row[:, None]
    if window is not None:
        visible = visible & (row[:, None] - torch.arange(t) < window)
    if documents is not None:
        visible = visible & (documents[:, t - s :, None] == documents[:, None])[:, None]
    return scores.masked_fill(~visible, -torch.inf), v


def plain(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scores, v = plain_scores(q, k, v, documents, scale, window, softcap)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v), scores.logsumexp(-1)


def inputs(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, s, t, h, kv, d = shape
    g = torch.Generator().manual_seed(seed)
    sizes = [(b, s, h, d), (b, t, kv, d), (b, t, kv, d), (b, s, h, d)]
    q, k, v, dout = (torch.randn(size, generator=g).to(dtype) for size in sizes)
    return q, k, v, dout


def expected(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, documents: Tensor | None, scale: float,
    window: int | None = None, softcap: float | None = None,
) -> list[Tensor]:  # fmt: skip
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = plain(*leaves, documents, scale, window, softcap)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.double())]
