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
from typing import Any

import torch
from torch import Tensor
from tpshard.kernels.attention import attention_blocks, attention_parts, flash
from tpshard.kernels.attention.attention_mask import visible
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


# The reference implementation, which also runs where no library kernel applies.


def blockwise(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`tpshard::attention` by matrix products over blocks of queries; the reference, for any device and dtype."""
    first_query = k.shape[1] - q.shape[1]
    return attention_blocks.forward(q, k, v, _pair(documents, first_query), scale, window, first_query, 0, softcap)


def blockwise_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor | None, scale: float,
    window: int | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`tpshard::attention_backward` by matrix products over blocks of queries."""
    first_query = k.shape[1] - q.shape[1]
    pair = _pair(documents, first_query)
    dq, dk, dv = attention_blocks.backward(dout, q, k, v, out, lse, pair, scale, window, first_query, 0, softcap)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _pair(documents: Tensor | None, first_query: int) -> attention_blocks.Documents:
    """The document ids of the queries and of the keys."""
    return None if documents is None else (documents[:, first_query:], documents)


# CPU: torch's flash kernel, four times faster than matrix products for a small model.


def _cpu_mask(q: Tensor, k: Tensor, documents: Tensor | None, window: int | None) -> Tensor | None:
    """The causal mask as torch's kernel adds it to the scores; None where the kernel's own causal mask is the same."""
    s, t = q.shape[1], k.shape[1]
    if documents is None and s == t and (window is None or window >= t):
        return None
    allowed = visible(_pair(documents, t - s), range(t - s, t), range(t), window, q.device)
    return torch.zeros((), dtype=q.dtype).where(allowed, -torch.inf)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values [b,t,kv,d] with every KV head repeated for the query heads that share it: [b,heads,t,d]."""
    x = x.transpose(1, 2)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _needs_blocks(q: Tensor, softcap: float | None) -> bool:
    """Whether torch's CPU kernel refuses these queries, so that `blockwise` computes them."""
    return not q.is_floating_point() or q.numel() == 0 or q.dtype == torch.float64 or softcap is not None


def _cpu(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(q, k, v, documents, window)
    if _needs_blocks(q, softcap):
        return blockwise(q, k, v, documents, scale, window, softcap)
    h = q.shape[2]
    mask = _cpu_mask(q, k, documents, window)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), _repeat_heads(k, h), _repeat_heads(v, h), 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor | None, scale: float,
    window: int | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if _needs_blocks(q, softcap):
        return blockwise_backward(dout, q, k, v, out, lse, documents, scale, window, softcap)
    h, kv = q.shape[2], k.shape[2]
    mask = _cpu_mask(q, k, documents, window)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout.transpose(1, 2), q.transpose(1, 2), _repeat_heads(k, h), _repeat_heads(v, h), out.transpose(1, 2), lse,
        0.0, mask is None, attn_mask=mask, scale=scale,
    )  # fmt: skip
    if h != kv:
        dk, dv = dk.unflatten(1, (kv, -1)).sum(2), dv.unflatten(1, (kv, -1)).sum(2)
    return dq.transpose(1, 2).contiguous(), dk.transpose(1, 2).contiguous(), dv.transpose(1, 2).contiguous()


# CUDA: torch's FlashAttention where it applies, else `blockwise` (fp32, odd head sizes, document ids out of order).


def _cuda(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(q, k, v, documents, window)
    if softcap is None and flash.applies(q, k, documents):
        return flash.forward(q, k, v, documents, scale, window)
    return blockwise(q, k, v, documents, scale, window, softcap)


def _cuda_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor | None, scale: float,
    window: int | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if softcap is None and flash.applies(q, k, documents):
        return flash.backward(dout, q, k, v, out, lse, documents, scale, window)
    return blockwise_backward(dout, q, k, v, out, lse, documents, scale, window, softcap)


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
    f"attention(Tensor q, Tensor k, Tensor v, {_SETTINGS}) -> (Tensor, Tensor)", _cpu, _shape, cuda=_cuda,
    gradient=_gradient, keep=_keep,
)  # fmt: skip
ATTENTION_BACKWARD = operation(
    f"attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_SETTINGS}) -> "
    "(Tensor, Tensor, Tensor)",
    _cpu_backward, _backward_shape, cuda=_cuda_backward,
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
