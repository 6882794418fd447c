"""Attention between a part of a sequence's queries and a part of its keys, for a sequence sharded over devices.

    tpshard::attention_part(q [b,s,h,d], k [b,t,kv,d], v [b,t,kv,d], query_documents [b,s] | None,
        key_documents [b,t] | None, scale, window | None, first_query, first_key,
        softcap | None) -> (out [b,s,h,d], lse [b,h,s])
    tpshard::attention_part_backward(dout, q, k, v, out, lse, query_documents, key_documents, scale, window,
        first_query, first_key, softcap | None) -> (dq, dk, dv), dk and dv in fp32 (fp64 for fp64)

The queries are the positions from `first_query` on, the keys those from `first_key` on; the mask is that of
`tpshard.kernels.attention.attention`. A query that attends to none of these keys has output 0 and logsumexp -inf. The
backward operation takes the output and logsumexps over all keys, and returns the gradients through these keys alone,
so that the gradients of several parts add up (Dao et al. 2022; ring attention, Liu et al. 2023)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tpshard.kernels.attention import attention_blocks
from tpshard.kernels.dtypes import wide_dtype
from tpshard.kernels.operation import operation


def forward(
    q: Tensor, k: Tensor, v: Tensor, query_documents: Tensor | None, key_documents: Tensor | None, scale: float,
    window: int | None, first_query: int, first_key: int, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes `tpshard::attention_part`, by `tpshard::attention` if the queries are the last of their visible keys."""
    t = max(0, min(k.shape[1], first_query + q.shape[1] - first_key))  # later keys are hidden from all queries
    k, v = k[:, :t], v[:, :t]
    if query_documents is None or key_documents is None:
        documents = None
    else:
        documents = (query_documents, key_documents[:, :t])
    if q.shape[1] <= t and first_query + q.shape[1] == first_key + t and (documents is None or q.shape[1] == t):
        own = None if documents is None else documents[1]
        return torch.ops.tpshard.attention(q, k.contiguous(), v.contiguous(), own, scale, window, softcap)
    return attention_blocks.forward(q, k, v, documents, scale, window, first_query, first_key, softcap)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, query_documents: Tensor | None,
    key_documents: Tensor | None, scale: float, window: int | None, first_query: int, first_key: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes `tpshard::attention_part_backward` by matrix products over blocks of queries."""
    documents = None if query_documents is None or key_documents is None else (query_documents, key_documents)
    return attention_blocks.backward(dout, q, k, v, out, lse, documents, scale, window, first_query, first_key, softcap)


def _shape(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide_dtype(q))


def _backward_shape(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape, dtype=wide_dtype(k)), v.new_empty(v.shape, dtype=wide_dtype(v))


_SETTINGS = (
    "Tensor? query_documents, Tensor? key_documents, float scale, int? window, int first_query, int first_key, "
    "float? softcap=None"
)
PART = operation(f"attention_part(Tensor q, Tensor k, Tensor v, {_SETTINGS}) -> (Tensor, Tensor)", forward, _shape)
PART_BACKWARD = operation(
    f"attention_part_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_SETTINGS}) -> "
    "(Tensor, Tensor, Tensor)",
    backward, _backward_shape,
)  # fmt: skip
