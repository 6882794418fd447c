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

from collections.abc import Callable
from typing import Any

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


def _forward(kernel: Forward) -> Callable[..., tuple[Tensor, Tensor]]:
    """`tpshard::attention_part` by a kernel."""

    def compute(
        q: Tensor, k: Tensor, v: Tensor, query_documents: Tensor | None, key_documents: Tensor | None, scale: float,
        window: int | None, first_query: int, first_key: int, softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        mask = _mask(q, k, query_documents, key_documents, window, first_query, first_key)
        t = len(mask.keys)
        if not t:
            return torch.zeros_like(q), q.new_full(
                (q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=wide_dtype(q)
            )
        return kernel(q, k[:, :t], v[:, :t], mask, scale, softcap)

    return compute


def _backward(kernel: Backward) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """`tpshard::attention_part_backward` by a kernel."""

    def compute(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, query_documents: Tensor | None,
        key_documents: Tensor | None, scale: float, window: int | None, first_query: int, first_key: int,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        mask = _mask(q, k, query_documents, key_documents, window, first_query, first_key)
        t = len(mask.keys)
        if not t:
            return torch.zeros_like(q), _wide_zeros(k), _wide_zeros(v)
        dq, dk, dv = kernel(dout, q, k[:, :t], v[:, :t], out, lse, mask, scale, softcap)
        return dq, _with_hidden(dk, k), _with_hidden(dv, v)

    return compute


def _mask(
    q: Tensor, k: Tensor, query_documents: Tensor | None, key_documents: Tensor | None, window: int | None,
    first_query: int, first_key: int,
) -> CausalMask:  # fmt: skip
    """The mask of a part, without the keys behind its last query."""
    documents = None if query_documents is None or key_documents is None else (query_documents, key_documents)
    queries, keys = range(first_query, first_query + q.shape[1]), range(first_key, first_key + k.shape[1])
    return CausalMask(queries, keys, documents, window).until_last()


def _wide_zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=wide_dtype(x), memory_format=torch.contiguous_format)


def _with_hidden(gradient: Tensor, x: Tensor) -> Tensor:
    """A gradient of the first keys or values of x, as one of all, in fp32 or fp64."""
    if gradient.shape[1] == x.shape[1]:
        return gradient.to(wide_dtype(x))
    whole = _wide_zeros(x)
    whole[:, : gradient.shape[1]] = gradient
    return whole


def _shape(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide_dtype(q))


def _backward_shape(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape, dtype=wide_dtype(k)), v.new_empty(v.shape, dtype=wide_dtype(v))


_SETTINGS = (
    "Tensor? query_documents, Tensor? key_documents, float scale, int? window, int first_query, int first_key, "
    "float? softcap=None"
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
