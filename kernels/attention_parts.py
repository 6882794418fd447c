"""Attention between a part of a sequence's queries and a part of its keys, for a sequence sharded over devices.

    tpshard::attention_part(q [b,s,h,d], k [b,t,kv,d], v [b,t,kv,d], query_documents [b,s] | None,
        key_documents [b,t] | None, scale, window | None, first_query, first_key,
        softcap | None) -> (out [b,s,h,d], lse [b,h,s])
    tpshard::attention_part_backward(dout, q, k, v, out, lse, query_documents, key_documents, scale, window,
        first_query, first_key, softcap | None) -> (dq, dk, dv), dk and dv in fp32 (fp64 for fp64)

The queries are the positions from `first_query` on, the keys those from `first_key` on; the mask is that of
`tpshard.kernels.attention`. A query that attends to none of these keys has output 0 and logsumexp -inf. The backward
operation takes the output and logsumexps over all keys, and returns the gradients through these keys alone, so that the
gradients of several parts add up (Dao et al. 2022; ring attention, Liu et al. 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor
from tpshard.kernels.attention_mask import capped, slopes, visible, wide

_library = torch.library.Library("tpshard", "FRAGMENT")
_library.define(
    "attention_part(Tensor q, Tensor k, Tensor v, Tensor? query_documents, Tensor? key_documents, float scale, "
    "int? window, int first_query, int first_key, float? softcap=None) -> (Tensor, Tensor)"
)
_library.define(
    "attention_part_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? query_documents, Tensor? key_documents, float scale, int? window, int first_query, int first_key, "
    "float? softcap=None) -> (Tensor, Tensor, Tensor)"
)

_BLOCK = 512
"""Query rows scored at once."""
Documents = tuple[Tensor | None, Tensor | None]


def _visible_count(s: int, t: int, first_query: int, first_key: int) -> int:
    """The number of leading keys that any of the queries may attend to."""
    return max(0, min(t, first_query + s - first_key))


def _aligned(s: int, t: int, first_query: int, first_key: int, documents: Documents) -> bool:
    """Whether the queries are the last positions of the keys, so that `tpshard::attention` computes the same."""
    return s <= t and first_query + s == first_key + t and (documents[0] is None or s == t)


def forward(
    q: Tensor, k: Tensor, v: Tensor, query_documents: Tensor | None, key_documents: Tensor | None, scale: float,
    window: int | None, first_query: int, first_key: int, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (b, s, h, _), kv = q.shape, k.shape[2]
    t = _visible_count(s, k.shape[1], first_query, first_key)
    k, v = k[:, :t], v[:, :t]
    documents = (query_documents, None if key_documents is None else key_documents[:, :t])
    if _aligned(s, t, first_query, first_key, documents):
        return torch.ops.tpshard.attention(q, k.contiguous(), v.contiguous(), documents[1], scale, window, softcap)
    out, lse = torch.zeros_like(q), q.new_full((b, h, s), -torch.inf, dtype=wide(q))
    if t == 0:
        return out, lse
    queries, keys, values = _grouped(q, kv) * scale, _grouped(k, kv), _grouped(v, kv)
    for start in range(0, s, _BLOCK):
        rows = slice(start, min(start + _BLOCK, s))
        mask = _mask(documents, rows, t, window, first_query, first_key, q.device)
        scores = capped(queries[..., rows, :] @ keys.transpose(-1, -2), softcap).masked_fill_(~mask, -torch.inf)
        row_lse = scores.logsumexp(-1)
        probabilities = scores.sub_(row_lse.unsqueeze(-1)).exp_().masked_fill_(~mask, 0)
        out[:, rows] = (probabilities @ values).permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
        lse[..., rows] = row_lse.flatten(1, 2)
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, query_documents: Tensor | None,
    key_documents: Tensor | None, scale: float, window: int | None, first_query: int, first_key: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    s, kv, whole = q.shape[1], k.shape[2], k.shape[1]
    t = _visible_count(s, whole, first_query, first_key)
    k, v = k[:, :t], v[:, :t]
    documents = (query_documents, None if key_documents is None else key_documents[:, :t])
    if t == 0:
        nothing = k.new_zeros((k.shape[0], whole, *k.shape[2:]), dtype=wide(k))
        return torch.zeros_like(q), nothing, nothing.clone()
    queries, keys, values = _grouped(q, kv), _grouped(k, kv), _grouped(v, kv)
    grad, logs = _grouped(dout, kv), lse.unflatten(1, (kv, -1)).unsqueeze(-1)
    mean = (grad * _grouped(out, kv)).sum(-1, keepdim=True)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    for start in range(0, s, _BLOCK):
        rows = slice(start, min(start + _BLOCK, s))
        mask = _mask(documents, rows, t, window, first_query, first_key, q.device)
        block, dblock = queries[..., rows, :], grad[..., rows, :]
        scores = capped((block * scale) @ keys.transpose(-1, -2), softcap)
        slope = slopes(scores, softcap)
        probabilities = scores.sub_(logs[..., rows, :]).exp_().masked_fill_(~mask, 0)
        dscores = (dblock @ values.transpose(-1, -2)).sub_(mean[..., rows, :]).mul_(probabilities).mul_(slope * scale)
        dq[:, rows] = (dscores @ keys).permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
        dk += (dscores.transpose(-1, -2) @ block).sum(2, keepdim=True)
        dv += (probabilities.transpose(-1, -2) @ dblock).sum(2, keepdim=True)
    return dq, _of_all(dk, whole), _of_all(dv, whole)


def _grouped(x: Tensor, kv: int) -> Tensor:
    """[b,s,h,d] -> [b,kv,h/kv,s,d] in fp32 or fp64"""
    return x.unflatten(2, (kv, -1)).permute(0, 2, 3, 1, 4).to(wide(x))


def _of_all(grad: Tensor, keys: int) -> Tensor:
    """[b,kv,1,t,d] -> [b,keys,kv,d], with zeros for the keys that no query attends to."""
    grad = grad.squeeze(2).transpose(1, 2)
    return torch.cat([grad, grad.new_zeros((grad.shape[0], keys - grad.shape[1], *grad.shape[2:]))], 1)


def _mask(
    documents: Documents, rows: slice, t: int, window: int | None, first_query: int, first_key: int,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """[b or 1, 1, 1, rows, t] bool"""
    own, other = documents
    pair = None if own is None or other is None else (own[:, rows], other)
    positions = range(first_query + rows.start, first_query + rows.stop)
    return visible(pair, positions, range(first_key, first_key + t), window, device).unsqueeze(1)


for _device in ("CPU", "CUDA"):
    _library.impl("attention_part", forward, _device)
    _library.impl("attention_part_backward", backward, _device)


@torch.library.register_fake("tpshard::attention_part", lib=_library)
def _shape(
    q: Tensor, k: Tensor, v: Tensor, query_documents: Tensor | None, key_documents: Tensor | None, scale: float,
    window: int | None, first_query: int, first_key: int, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide(q))


@torch.library.register_fake("tpshard::attention_part_backward", lib=_library)
def _backward_shape(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, query_documents: Tensor | None,
    key_documents: Tensor | None, scale: float, window: int | None, first_query: int, first_key: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape, dtype=wide(k)), v.new_empty(v.shape, dtype=wide(v))
