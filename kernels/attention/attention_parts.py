"""Attention between a part of a sequence's queries and a part of its keys, for a sequence sharded over devices.

    tpshard::attention_part(q [b,s,h,d], k [b,t,kv,d], v [b,t,kv,d], query_documents [b,s] | None,
        key_documents [b,t] | None, scale, window | None, first_query, first_key,
        softcap | None, second_query | None, second_key | None) -> (out [b,s,h,d], lse [b,h,s])
    tpshard::attention_part_backward(dout, q, k, v, out, lse, query_documents, key_documents, scale, window,
        first_query, first_key, softcap | None, second_query | None, second_key | None)
        -> (dq, dk, dv), dk and dv in fp32 (fp64 for fp64)

The queries are the positions from `first_query` on, the keys those from `first_key` on; the mask is that of
`tpshard.kernels.attention.attention`. With `second_query` and `second_key`, the second half of either stands from that
position on, behind the first: a chunk from the sequence's front and its mirror image from the back, all chunks of one
size and without a window. A query that attends to none of these keys has output 0 and logsumexp -inf. The backward
operation takes the output and logsumexps over all keys, and returns the gradients through these keys alone, so that
the gradients of several parts add up (Dao et al. 2022; ring attention, Liu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tpshard.kernels.attention import cpu_attention, cuda_attention
from tpshard.kernels.attention.attention_mask import CausalMask
from tpshard.kernels.dtypes import wide_dtype
from tpshard.kernels.operation import operation

Forward = Callable[[Tensor, Tensor, Tensor, CausalMask, float, float | None], tuple[Tensor, Tensor]]
"""A kernel: q, k, v, mask, scale, softcap -> out, lse."""
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""A kernel: dout, q, k, v, out, lse, mask, scale, softcap -> dq, dk, dv, the latter two in any dtype."""


class Visible(NamedTuple):
    """The queries and keys of a part between which there is attention."""

    rows: slice
    keys: slice
    mask: CausalMask


def _forward(kernel: Forward) -> Callable[..., tuple[Tensor, Tensor]]:
    """`tpshard::attention_part` by a kernel."""

    def compute(
        q: Tensor, k: Tensor, v: Tensor, query_documents: Tensor | None, key_documents: Tensor | None, scale: float,
        window: int | None, first_query: int, first_key: int, softcap: float | None = None,
        second_query: int | None = None, second_key: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        documents = None if query_documents is None or key_documents is None else (query_documents, key_documents)
        sizes = q.shape[1], k.shape[1]
        rows, keys, mask = _visible(*sizes, documents, window, first_query, first_key, second_query, second_key)
        if not mask.keys or not mask.queries:
            return _nothing(q)
        out, lse = kernel(q[:, rows], k[:, keys], v[:, keys], mask, scale, softcap)
        if len(mask.queries) == q.shape[1]:
            return out, lse
        whole, logs = _nothing(q)
        whole[:, rows], logs[..., rows] = out, lse
        return whole, logs

    return compute


def _backward(kernel: Backward) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """`tpshard::attention_part_backward` by a kernel."""

    def compute(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, query_documents: Tensor | None,
        key_documents: Tensor | None, scale: float, window: int | None, first_query: int, first_key: int,
        softcap: float | None = None, second_query: int | None = None, second_key: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        documents = None if query_documents is None or key_documents is None else (query_documents, key_documents)
        sizes = q.shape[1], k.shape[1]
        rows, keys, mask = _visible(*sizes, documents, window, first_query, first_key, second_query, second_key)
        wide = wide_dtype(k)
        if not mask.keys or not mask.queries:
            return _zeros(q, q.dtype), _zeros(k, wide), _zeros(v, wide)
        here = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[..., rows]
        dq, dk, dv = kernel(*here, mask, scale, softcap)
        return _among(dq, q, rows, q.dtype), _among(dk, k, keys, wide), _among(dv, v, keys, wide)

    return compute


def _visible(
    s: int, t: int, documents: tuple[Tensor, Tensor] | None, window: int | None, first_query: int, first_key: int,
    second_query: int | None, second_key: int | None,
) -> Visible:  # fmt: skip
    """What of a part's s queries and t keys is computed, without the keys behind the last query."""
    everything = slice(None)
    if second_query is None or second_key is None:
        queries, keys = range(first_query, first_query + s), range(first_key, first_key + t)
        mask = CausalMask(queries, keys, documents, window).until_last()
        return Visible(everything, slice(0, len(mask.keys)), mask)
    if window is not None or s != t or s % 2:
        raise ValueError("attention_part: two chunks have no window, and as many keys as queries, in equal halves")
    if first_query == first_key and second_query == second_key:  # the order decides, not the distance
        return Visible(everything, everything, CausalMask(range(s), range(s), documents))
    before = [sum(start < query for start in (first_key, second_key)) for query in (first_query, second_query)]
    if before[0] not in (0, before[1]):
        raise ValueError("attention_part: the chunks of keys are not mirror images, as those of queries are")
    rows, keys_seen = slice(0 if before[0] else s // 2, s), slice(0, before[1] * (t // 2))
    if documents is not None:
        documents = documents[0][:, rows], documents[1][:, keys_seen]
    behind = keys_seen.stop
    mask = CausalMask(range(behind, behind + s - rows.start), range(behind), documents)
    return Visible(rows, keys_seen, mask)


def _nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    """The results of queries without keys."""
    logs = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=wide_dtype(q))
    return _zeros(q, q.dtype), logs


def _zeros(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _among(gradient: Tensor, x: Tensor, where: slice, dtype: torch.dtype) -> Tensor:
    """The gradient of a part of x's rows, as one of all."""
    if gradient.shape[1] == x.shape[1]:
        return gradient.to(dtype)
    whole = _zeros(x, dtype)
    whole[:, where] = gradient
    return whole


def _shape(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide_dtype(q))


def _backward_shape(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape, dtype=wide_dtype(k)), v.new_empty(v.shape, dtype=wide_dtype(v))


_SETTINGS = (
    "Tensor? query_documents, Tensor? key_documents, float scale, int? window, int first_query, int first_key, "
    "float? softcap=None, int? second_query=None, int? second_key=None"
)
PART = operation(
    f"attention_part(Tensor q, Tensor k, Tensor v, {_SETTINGS}) -> (Tensor, Tensor)",
    _forward(cpu_attention.forward), _shape, cuda=_forward(cuda_attention.forward),
)  # fmt: skip
PART_BACKWARD = operation(
    f"attention_part_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_SETTINGS}) -> "
    "(Tensor, Tensor, Tensor)",
    _backward(cpu_attention.backward), _backward_shape, cuda=_backward(cuda_attention.backward),
)  # fmt: skip
