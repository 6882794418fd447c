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
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from tpshard.kernels import attention_parts, flash
from tpshard.kernels.attention_mask import capped, slopes, visible, wide

_library = torch.library.Library("tpshard", "FRAGMENT")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? documents, float scale, int? window=None, "
    "float? softcap=None) -> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? documents, "
    "float scale, int? window=None, float? softcap=None) -> (Tensor, Tensor, Tensor)"
)

PARTS = attention_parts.__name__
"""The module of the partial-sequence operations; importing it here registers them together with these."""
ATTENTION = torch.ops.tpshard.attention.default

_BLOCK = 512
"""Query rows scored at once by the blockwise path, which needs b * h * _BLOCK * t floats of memory."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, scale: float | None = None,
    window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention: q [b,s,h,d], k and v [b,t,kv,d] -> [b,s,h,d]. `scale` defaults to 1 / sqrt(head_dim)."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    out, _ = torch.ops.tpshard.attention(q, k, v, documents, scale, window, softcap)
    return out


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


def _allowed(documents: Tensor | None, rows: range, keys: range, window: int | None, device: torch.device) -> Tensor:
    """The causal mask, true where a row may attend to a key: [b or 1, 1, rows, keys] bool."""
    pair = None if documents is None else (documents[:, rows.start : rows.stop], documents[:, keys.start : keys.stop])
    return visible(pair, rows, keys, window, device)


# The reference: matrix products over blocks of queries, in fp32 or fp64. Also used where no library kernel applies.


def _blocks(s: int, t: int, window: int | None) -> Iterator[tuple[slice, range, range]]:
    """Blocks of queries, each as (slice of the queries, their positions, the positions that any of them attends to)."""
    for start in range(0, s, _BLOCK):
        stop = min(start + _BLOCK, s)
        rows = range(t - s + start, t - s + stop)
        yield slice(start, stop), rows, range(0 if window is None else max(0, rows.start - window + 1), rows.stop)


def _grouped(x: Tensor, kv: int) -> Tensor:
    """[b,s,h,d] -> [b,kv,h/kv,s,d] in fp32 or fp64"""
    return x.unflatten(2, (kv, -1)).permute(0, 2, 3, 1, 4).to(wide(x))


def blockwise(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal attention by matrix products over blocks of queries; the reference, for any device and dtype."""
    (b, s, h, _), t, kv = q.shape, k.shape[1], k.shape[2]
    queries, keys, values = _grouped(q, kv) * scale, _grouped(k, kv), _grouped(v, kv)
    out, lse = torch.empty_like(q), torch.empty(b, h, s, dtype=wide(q), device=q.device)
    for rows, positions, visible_keys in _blocks(s, t, window):
        part = slice(visible_keys.start, visible_keys.stop)
        scores = capped(queries[..., rows, :] @ keys[..., part, :].transpose(-1, -2), softcap)
        mask = _allowed(documents, positions, visible_keys, window, q.device).unsqueeze(1)
        scores.masked_fill_(~mask, -torch.inf)
        row_lse = scores.logsumexp(-1)
        probabilities = scores.sub_(row_lse.unsqueeze(-1)).exp_()
        out[:, rows] = (probabilities @ values[..., part, :]).permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
        lse[..., rows] = row_lse.flatten(1, 2)
    return out, lse


def blockwise_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor | None, scale: float,
    window: int | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of `blockwise` from its output and logsumexps (Dao et al. 2022, algorithm 4)."""
    s, t, kv = q.shape[1], k.shape[1], k.shape[2]
    queries, keys, values = _grouped(q, kv), _grouped(k, kv), _grouped(v, kv)
    grad, logs = _grouped(dout, kv), lse.unflatten(1, (kv, -1)).unsqueeze(-1)
    mean = (grad * _grouped(out, kv)).sum(-1, keepdim=True)
    dq = torch.empty_like(q)
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    for rows, positions, visible_keys in _blocks(s, t, window):
        part = slice(visible_keys.start, visible_keys.stop)
        block, dblock = queries[..., rows, :], grad[..., rows, :]
        scores = capped((block * scale) @ keys[..., part, :].transpose(-1, -2), softcap)
        slope = slopes(scores, softcap)
        mask = _allowed(documents, positions, visible_keys, window, q.device).unsqueeze(1)
        scores.masked_fill_(~mask, -torch.inf)
        probabilities = scores.sub_(logs[..., rows, :]).exp_()
        dscores = dblock @ values[..., part, :].transpose(-1, -2)
        dscores.sub_(mean[..., rows, :]).mul_(probabilities).mul_(slope * scale)
        dq[:, rows] = (dscores @ keys[..., part, :]).permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
        dk[..., part, :] += (dscores.transpose(-1, -2) @ block).sum(2, keepdim=True)
        dv[..., part, :] += (probabilities.transpose(-1, -2) @ dblock).sum(2, keepdim=True)
    return dq, dk.squeeze(2).transpose(1, 2).to(k.dtype), dv.squeeze(2).transpose(1, 2).to(v.dtype)


# CPU: torch's flash kernel, four times faster than matrix products for a small model.


def _cpu_mask(q: Tensor, k: Tensor, documents: Tensor | None, window: int | None) -> Tensor | None:
    s, t = q.shape[1], k.shape[1]
    if documents is None and s == t and (window is None or window >= t):
        return None
    allowed = _allowed(documents, range(t - s, t), range(t), window, q.device)
    return torch.zeros((), dtype=q.dtype).where(allowed, -torch.inf)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """[b,t,kv,d] -> [b,heads,t,d]"""
    x = x.transpose(1, 2)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _plain(q: Tensor, softcap: float | None) -> bool:
    """Whether torch's kernel does not take this."""
    return not q.is_floating_point() or q.numel() == 0 or q.dtype == torch.float64 or softcap is not None


def _cpu(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(q, k, v, documents, window)
    if _plain(q, softcap):
        return blockwise(q, k, v, documents, scale, window, softcap)
    h = q.shape[2]
    mask = _cpu_mask(q, k, documents, window)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), _repeated(k, h), _repeated(v, h), 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor | None, scale: float,
    window: int | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if _plain(q, softcap):
        return blockwise_backward(dout, q, k, v, out, lse, documents, scale, window, softcap)
    h, kv = q.shape[2], k.shape[2]
    mask = _cpu_mask(q, k, documents, window)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout.transpose(1, 2), q.transpose(1, 2), _repeated(k, h), _repeated(v, h), out.transpose(1, 2), lse,
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


_library.impl("attention", _cpu, "CPU")
_library.impl("attention_backward", _cpu_backward, "CPU")
_library.impl("attention", _cuda, "CUDA")
_library.impl("attention_backward", _cuda_backward, "CUDA")


@torch.library.register_fake("tpshard::attention", lib=_library)
def _shape(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    b, s, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((b, h, s), dtype=wide(q))


@torch.library.register_fake("tpshard::attention_backward", lib=_library)
def _backward_shape(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor | None, scale: float,
    window: int | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
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


torch.library.register_autograd("tpshard::attention", _gradient, setup_context=_keep, lib=_library)


@torch.library.register_vmap("tpshard::attention", lib=_library)
def _mapped(
    info: Any, in_dims: tuple[int | None, ...], q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None,
    scale: float, window: int | None = None, softcap: float | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:  # fmt: skip
    """The mapped dim joins the batch, outside of it."""
    n = info.batch_size

    def merged(x: Tensor, dim: int | None) -> Tensor:
        return (x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    q, k, v = (merged(x, dim) for x, dim in zip((q, k, v), in_dims))
    documents = documents if documents is None else merged(documents, in_dims[3])
    out, lse = torch.ops.tpshard.attention(q, k, v, documents, scale, window, softcap)
    return (out.unflatten(0, (n, -1)), lse.unflatten(0, (n, -1))), (0, 0)
