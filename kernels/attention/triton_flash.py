"""Attention under any `CausalMask` in Triton, with softcaps: what torch's FlashAttention does not compute.

Scores stay on the chip (Dao et al. 2022). Each program adds up keys, or queries and the heads that share a KV head, in
their order, so that the same inputs give the same bits, and a head's do not depend on the others.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# (kernel arguments are Triton's own values, typed at launch)
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from tpshard.kernels.attention.attention_mask import CausalMask
from tpshard.kernels.triton_device import capability_of, shared_kib

_LOG2_E = math.log2(math.e)
"""Scores are in bits: a device has 2 ** x alone."""
_ALL = 2**30
"""The window that stands for none."""


@triton.jit
def _capped(products, scale, softcap, CAPPED: tl.constexpr):
    """Scores in bits, and with CAPPED tanh of what the cap divides (else anything)."""
    if CAPPED:
        ratio = 2 * tl.sigmoid(products * scale) - 1  # tanh; the scale holds the softcap
        return ratio * softcap, ratio
    else:
        return products * scale, products


@triton.jit
def _seen(m, n, of_rows, of_keys, keys, shift, window, WINDOWED: tl.constexpr, PACKED: tl.constexpr):
    """Which of the keys n the queries m attend to; both broadcast."""
    seen = (n <= m + shift) & (n < keys)
    if WINDOWED:
        seen &= n > m + shift - window
    if PACKED:
        seen &= of_rows == of_keys
    return seen


@triton.jit
def _keys_at(k, v, documents, there, first, of_sequence, step, keys, d, HEAD: tl.constexpr, PACKED: tl.constexpr):
    """The keys and values [N, D] at `there` of a KV head that begins at `first`, and their documents [N]."""
    place = first + there.to(tl.int64)[:, None] * step + d[None, :]
    inside = (there < keys)[:, None] & (d < HEAD)[None, :]
    of_keys = there
    if PACKED:
        of_keys = tl.load(documents + of_sequence + there, mask=there < keys, other=0)
    return tl.load(k + place, mask=inside, other=0.0), tl.load(v + place, mask=inside, other=0.0), of_keys


@triton.jit
def forward_kernel(
    q, k, v, row_documents, key_documents, out, lse, rows, keys, heads, kv_heads, scale, softcap, shift, window,
    HEAD: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Attention of M queries of one head. Grid: (tiles of rows, sequences * heads).

    q, out: [b, rows, heads, HEAD]; k, v: [b, keys, kv_heads, HEAD]; documents: [b, rows], [b, keys]; lse: [b, heads,
    rows]. Query m stands at key m + shift.
    """
    sequence, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # those with the most keys first
    m, n, d = begin + tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    in_rows = (m < rows)[:, None] & (d < HEAD)[None, :]
    at = ((sequence * rows + m) * heads + head)[:, None] * HEAD + d[None, :]
    queries = tl.load(q + at, mask=in_rows, other=0.0)
    of_rows = m
    if PACKED:
        of_rows = tl.load(row_documents + sequence * rows + m, mask=m < rows, other=0)
    step = kv_heads * HEAD
    first = (sequence * keys * kv_heads + head // (heads // kv_heads)) * HEAD
    top = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    weighted = tl.zeros([M, D], tl.float32)
    low = tl.maximum(begin + shift - window + 1, 0) // N * N
    for start in range(low, tl.minimum(tl.minimum(begin + M, rows) + shift, keys), N):
        there = start + n
        tile, values, of_keys = _keys_at(
            k, v, key_documents, there, first, sequence * keys, step, keys, d, HEAD, PACKED
        )
        scores, _ = _capped(tl.dot(queries, tl.trans(tile), input_precision="ieee"), scale, softcap, CAPPED)
        if PACKED or WINDOWED or start + N > begin + shift + 1:
            seen = _seen(m[:, None], there[None, :], of_rows[:, None], of_keys[None, :], keys, shift, window, WINDOWED,
                         PACKED)  # fmt: skip
            scores = tl.where(seen, scores, -float("inf"))
        now = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(now == -float("inf"), 0.0, now)
        weights, shrunk = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
        total = total * shrunk + tl.sum(weights, 1)
        weighted *= shrunk[:, None]
        weighted += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = now
    result = weighted / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=in_rows)
    logs = tl.where(total > 0, (top + tl.log2(tl.where(total > 0, total, 1.0))) * 0.6931471805599453, -float("inf"))
    tl.store(lse + (sequence * heads + head) * rows + m, logs, mask=m < rows)


@triton.jit
def query_gradient_kernel(
    dout, q, k, v, out, lse, row_documents, key_documents, dq, means, rows, keys, heads, kv_heads, plain_scale, scale,
    softcap, shift, window, HEAD: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The gradients of M queries, and their means of dout * out, [b, heads, rows]. Grid and shapes as of the forward
    kernel."""
    sequence, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    m, n, d = begin + tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    in_rows = (m < rows)[:, None] & (d < HEAD)[None, :]
    at = ((sequence * rows + m) * heads + head)[:, None] * HEAD + d[None, :]
    grads = tl.load(dout + at, mask=in_rows, other=0.0)
    results = tl.load(out + at, mask=in_rows, other=0.0)
    mean = tl.sum(grads.to(tl.float32) * results.to(tl.float32), 1)
    of_row = (sequence * heads + head) * rows + m
    tl.store(means + of_row, mean, mask=m < rows)
    queries = tl.load(q + at, mask=in_rows, other=0.0)
    logs = tl.load(lse + of_row, mask=m < rows, other=0.0) * 1.4426950408889634
    of_rows = m
    if PACKED:
        of_rows = tl.load(row_documents + sequence * rows + m, mask=m < rows, other=0)
    step = kv_heads * HEAD
    first = (sequence * keys * kv_heads + head // (heads // kv_heads)) * HEAD
    gradient = tl.zeros([M, D], tl.float32)
    low = tl.maximum(begin + shift - window + 1, 0) // N * N
    for start in range(low, tl.minimum(tl.minimum(begin + M, rows) + shift, keys), N):
        there = start + n
        tile, values, of_keys = _keys_at(
            k, v, key_documents, there, first, sequence * keys, step, keys, d, HEAD, PACKED
        )
        scores, ratio = _capped(tl.dot(queries, tl.trans(tile), input_precision="ieee"), scale, softcap, CAPPED)
        seen = _seen(m[:, None], there[None, :], of_rows[:, None], of_keys[None, :], keys, shift, window, WINDOWED,
                     PACKED)  # fmt: skip
        weights = tl.where(seen, tl.exp2(scores - logs[:, None]), 0.0)
        slopes = weights * (tl.dot(grads, tl.trans(values), input_precision="ieee") - mean[:, None])
        if CAPPED:
            slopes *= 1 - ratio * ratio
        gradient += tl.dot(slopes.to(tile.dtype), tile, input_precision="ieee")
    tl.store(dq + at, (gradient * plain_scale).to(dq.dtype.element_ty), mask=in_rows)


@triton.jit
def key_gradient_kernel(
    dout, q, k, v, lse, row_documents, key_documents, dk, dv, means, rows, keys, heads, kv_heads, plain_scale, scale,
    softcap, shift, window, HEAD: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The gradients of N keys and their values. Grid: (tiles of keys, sequences * KV heads); shapes as above."""
    sequence, kv = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    begin, group = tl.program_id(0) * N, heads // kv_heads
    m, n, d = tl.arange(0, M), begin + tl.arange(0, N), tl.arange(0, D)
    in_keys = (n < keys)[:, None] & (d < HEAD)[None, :]
    at = ((sequence * keys + n) * kv_heads + kv)[:, None] * HEAD + d[None, :]
    tile = tl.load(k + at, mask=in_keys, other=0.0)
    values = tl.load(v + at, mask=in_keys, other=0.0)
    of_keys = n
    if PACKED:
        of_keys = tl.load(key_documents + sequence * keys + n, mask=n < keys, other=0)
    of_tile = tl.zeros([N, D], tl.float32)
    of_values = tl.zeros([N, D], tl.float32)
    low = tl.maximum(begin - shift, 0) // M * M
    high = tl.minimum(tl.minimum(begin + N, keys) - 1 - shift + window, rows)  # behind the last that sees one
    for turn in range(group * tl.cdiv(tl.maximum(high - low, 0), M)):
        head = kv * group + turn % group
        there = low + turn // group * M + m
        place = ((sequence * rows + there) * heads + head)[:, None] * HEAD + d[None, :]
        inside = (there < rows)[:, None] & (d < HEAD)[None, :]
        queries = tl.load(q + place, mask=inside, other=0.0)
        grads = tl.load(dout + place, mask=inside, other=0.0)
        of_row = (sequence * heads + head) * rows + there
        logs = tl.load(lse + of_row, mask=there < rows, other=0.0) * 1.4426950408889634
        mean = tl.load(means + of_row, mask=there < rows, other=0.0)
        of_rows = there
        if PACKED:
            of_rows = tl.load(row_documents + sequence * rows + there, mask=there < rows, other=0)
        scores, ratio = _capped(tl.dot(tile, tl.trans(queries), input_precision="ieee"), scale, softcap, CAPPED)
        seen = _seen(there[None, :], n[:, None], of_rows[None, :], of_keys[:, None], keys, shift, window, WINDOWED,
                     PACKED)  # fmt: skip
        weights = tl.where(seen & (there < rows)[None, :], tl.exp2(scores - logs[None, :]), 0.0)
        of_values += tl.dot(weights.to(grads.dtype), grads, input_precision="ieee")
        slopes = weights * (tl.dot(values, tl.trans(grads), input_precision="ieee") - mean[None, :])
        if CAPPED:
            slopes *= 1 - ratio * ratio
        of_tile += tl.dot(slopes.to(queries.dtype), queries, input_precision="ieee")
    tl.store(dk + at, (of_tile * plain_scale).to(dk.dtype.element_ty), mask=in_keys)
    tl.store(dv + at, of_values.to(dv.dtype.element_ty), mask=in_keys)


@dataclass(frozen=True)
class FlashTile:
    """The queries and keys of a program's products."""

    rows: int
    keys: int
    warps: int
    stages: int

    @staticmethod
    def of(kernel: str, head: int, dtype: torch.dtype, capability: tuple[int, int] = (9, 0)) -> FlashTile:
        """Of `forward`, `queries` or `keys`, the gradients' kernels; a test compiles them for each kind of device."""
        roomy, wide = shared_kib(capability) > 99, head > 128
        if dtype == torch.float32:
            return FlashTile(16, 16, 4, 1)
        if kernel == "forward":
            return FlashTile(64 if wide else 128, 64 if roomy or not wide else 32, 8, 2)
        if not wide:
            return FlashTile(64, 64, 8, 2)
        return FlashTile(64 if roomy or kernel == "queries" else 32, 32, 8, 2 if roomy else 1)

    def sizes(self, head: int) -> dict[str, int]:
        """The compile-time sizes for heads of this size."""
        return {"HEAD": head, "D": max(16, triton.next_power_of_2(head)), "M": self.rows, "N": self.keys}


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: CausalMask, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The output [b,s,h,d] and logsumexps [b,h,s] of attention from q [b,s,h,d] to k and v [b,t,kv,d]."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    b, s, h, d = q.shape
    out, lse = torch.empty_like(q), q.new_empty((b, h, s), dtype=torch.float32)
    tile = FlashTile.of("forward", d, q.dtype, capability_of(q))
    forward_kernel[triton.cdiv(s, tile.rows), b * h](
        q, k, v, *_documents(mask, q), out, lse, s, k.shape[1], h, k.shape[2], *_scales(scale, softcap), *_span(mask),
        **tile.sizes(d), **_kind(mask, softcap), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: CausalMask, scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v, from the output and logsumexps over all keys."""
    dout, q, k, v, out, lse = (x.contiguous() for x in (dout, q, k, v, out, lse))
    (b, s, h, d), (t, kv) = q.shape, k.shape[1:3]
    dq, dk, dv, means = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)
    documents, numbers = _documents(mask, q), (s, t, h, kv, scale, *_scales(scale, softcap), *_span(mask))
    tile = FlashTile.of("queries", d, q.dtype, capability_of(q))
    query_gradient_kernel[triton.cdiv(s, tile.rows), b * h](
        dout, q, k, v, out, lse, *documents, dq, means, *numbers, **tile.sizes(d), **_kind(mask, softcap),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    tile = FlashTile.of("keys", d, q.dtype, capability_of(q))
    key_gradient_kernel[triton.cdiv(t, tile.keys), b * kv](
        dout, q, k, v, lse, *documents, dk, dv, means, *numbers, **tile.sizes(d), **_kind(mask, softcap),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dq, dk, dv


def _documents(mask: CausalMask, q: Tensor) -> tuple[Tensor, Tensor]:
    return (q, q) if mask.documents is None else (mask.documents[0].contiguous(), mask.documents[1].contiguous())


def _scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """What products are multiplied by, and what tanh of them is, for scores in bits."""
    return (scale * _LOG2_E, 1.0) if softcap is None else (2 * scale / softcap, softcap * _LOG2_E)


def _span(mask: CausalMask) -> tuple[int, int]:
    """How far the queries stand behind the keys, and the window."""
    return mask.queries.start - mask.keys.start, mask.window or _ALL


def _kind(mask: CausalMask, softcap: float | None) -> dict[str, bool]:
    packed, windowed = mask.documents is not None, mask.window is not None
    return {"CAPPED": softcap is not None, "WINDOWED": windowed, "PACKED": packed}
