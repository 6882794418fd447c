"""Causal attention as one custom operation, with its backward pass, so that it can be sharded over batch and heads.

    tpshard::attention(q [b,s,h,d], k [b,t,kv,d], v [b,t,kv,d], documents [b,t] | None, scale, window | None,
                       softcap | None) -> (out [b,s,h,d], lse [b,h,s] fp32; fp64 for fp64)
    tpshard::attention_backward(dout, q, k, v, out, lse, documents, scale, window, softcap) -> (dq, dk, dv)

Head i reads KV head i // (h / kv). The queries are the last s of t positions. Position i attends to positions j <= i;
with a `window`, only to the last `window` of them, itself included; with `documents`, only where documents[i] ==
documents[j]. With a `softcap` c, scores x become c * tanh(x / c) (Gemma 2). `lse` is the logsumexp of each row's
scores. Every path is deterministic: the same inputs give the same bits, and a head's result does not depend on the
other heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tpshard.kernels.attention import attention_blocks, attention_parts, cpu_attention, cuda_attention
from tpshard.kernels.attention.attention_mask import last_of
from tpshard.kernels.attention.attention_parts import Backward, Forward
from tpshard.kernels.dtypes import wide_dtype
from tpshard.kernels.operation import LIBRARY, operation


def attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, scale: float | None = None,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention: q [b,s,h,d], k and v [b,t,kv,d] -> [b,s,h,d]. `scale` defaults to 1 / sqrt(head_dim).

    sinks: [h], scores of a further key per head, whose value is zero (gpt-oss).
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if sinks is not None:
        out, _ = _WithSinks.apply(q, k, v, documents, sinks, scale, window, softcap)  # type: ignore[no-untyped-call]
        return out
    out, _ = torch.ops.tpshard.attention(q, k, v, documents, scale, window, softcap)
    return out


class _WithSinks(torch.autograd.Function):
    """Attention with sinks: scales the output of attention without sinks by the other keys' share of the softmax."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, sinks: Tensor, scale: float, window: int | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The output [b,s,h,d] and the logsumexps [b,h,s] of all scores, those of the sinks included."""
        out, lse = torch.ops.tpshard.attention(q, k, v, documents, scale, window, softcap)
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        return out * (lse - total).exp().transpose(1, 2)[..., None].to(out.dtype), total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, documents, sinks, *ctx.how = inputs
        ctx.save_for_backward(q, k, v, documents, sinks, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """With the total logsumexps, the gradients of q, k and v are those of attention without sinks."""
        q, k, v, documents, sinks, out, total = ctx.saved_tensors
        dq, dk, dv = torch.ops.tpshard.attention_backward(dout, q, k, v, out, total, documents, *ctx.how)
        share = (sinks.to(total.dtype)[:, None] - total).exp()
        mean = (dout * out).sum(-1, dtype=total.dtype).transpose(1, 2)
        return dq, dk, dv, None, -(share * mean).sum((0, 2)).to(sinks.dtype), None, None, None


def _check(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None) -> None:
    b, s, h, d = q.shape
    if k.shape != v.shape or k.shape[0] != b or k.shape[3] != d or h % k.shape[2] or k.shape[1] < s:
        raise ValueError(
            f"attention: the shapes of q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not match"
        )
    if documents is not None and documents.shape != (b, k.shape[1]):
        raise ValueError(f"attention: documents {list(documents.shape)} must be [batch, keys] of k {list(k.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"attention: window is {window}; it must be at least 1, the row's own position")


def _forward(kernel: Forward) -> Callable[..., tuple[Tensor, Tensor]]:
    """`tpshard::attention` by a kernel."""

    def compute(
        q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window: int | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        _check(q, k, v, documents, window)
        return kernel(q, k, v, last_of(q.shape[1], k.shape[1], documents, window), scale, softcap)

    return compute


def _backward(kernel: Backward) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """`tpshard::attention_backward` by a kernel."""

    def compute(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor | None,
        scale: float, window: int | None = None, softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        mask = last_of(q.shape[1], k.shape[1], documents, window)
        dq, dk, dv = kernel(dout, q, k, v, out, lse, mask, scale, softcap)
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    return compute


blockwise, blockwise_backward = _forward(attention_blocks.forward), _backward(attention_blocks.backward)
"""The operations by matrix products over blocks of queries: the reference, for any device and dtype."""


def _shape(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    b, s, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((b, h, s), dtype=wide_dtype(q))


def _backward_shape(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, ctx.scale, ctx.window, ctx.softcap = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, documents, *output)


def _gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    assert dlse is None, "the logsumexps of attention serve its backward pass and cannot be differentiated"
    if dout is None:
        return None, None, None, None, None, None, None
    q, k, v, documents, out, lse = ctx.saved_tensors
    how = (documents, ctx.scale, ctx.window, ctx.softcap)
    back = torch.ops.tpshard.attention_backward(dout, q, k, v, out, lse, *how)
    return *back, None, None, None, None


_SETTINGS = "Tensor? documents, float scale, int? window=None, float? softcap=None"
ATTENTION = operation(
    f"attention(Tensor q, Tensor k, Tensor v, {_SETTINGS}) -> (Tensor, Tensor)",
    _forward(cpu_attention.forward), _shape, cuda=_forward(cuda_attention.forward), gradient=_gradient, keep=_keep,
)  # fmt: skip
ATTENTION_BACKWARD = operation(
    f"attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_SETTINGS}) -> "
    "(Tensor, Tensor, Tensor)",
    _backward(cpu_attention.backward), _backward_shape, cuda=_backward(cuda_attention.backward),
)  # fmt: skip
ATTENTION_PART = attention_parts.PART
ATTENTION_PART_BACKWARD = attention_parts.PART_BACKWARD


@torch.library.register_vmap("tpshard::attention", lib=LIBRARY)
def _vmap(
    info: Any, in_dims: tuple[int | None, ...], q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None,
    *settings: Any,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:  # fmt: skip
    """Attention mapped over a dim (`torch.vmap`), which joins the batch as its outer part."""
    n = info.batch_size

    def merge_into_batch(x: Tensor, dim: int | None) -> Tensor:
        return (x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    q, k, v = (merge_into_batch(x, dim) for x, dim in zip((q, k, v), in_dims))
    documents = documents if documents is None else merge_into_batch(documents, in_dims[3])
    out, lse = torch.ops.tpshard.attention(q, k, v, documents, *settings)
    return (out.unflatten(0, (n, -1)), lse.unflatten(0, (n, -1))), (0, 0)
