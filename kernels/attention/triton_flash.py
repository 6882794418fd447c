"""Attention under any `CausalMask` in Triton, with softcaps: what torch's FlashAttention does not compute.

Scores stay on the chip (Dao et al. 2022). Each program adds up keys, or queries and the heads that share a KV head, in
their order, so that the same inputs give the same bits, and a head's do not depend on the others.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# (kernel arguments are Triton's own values, typed at launch)
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from tpshard.kernels.attention.attention_mask import CausalMask
from tpshard.kernels.attention.triton_scores import LOG2_E, graded_scores, powers, scales
from tpshard.kernels.triton_device import capability_of, shared_kib

_ALL = 2**30
"""The window that stands for none."""


@triton.jit
def _seen(m, n, of_rows, of_keys, keys, window, WINDOWED: tl.constexpr, PACKED: tl.constexpr):
    """Which of the keys at n, of so many, queries that stand at m attend to; both broadcast."""
    seen = (n <= m) & (n < keys)
    if WINDOWED:
        seen &= n > m - window
    if PACKED:
        seen &= of_rows == of_keys
    return seen


@triton.jit
def _with_documents(documents, own, inside, low, high, BLOCK: tl.constexpr):
    """The first and behind the last of the positions [low, high) whose document lies between the least and the most of
    the documents `own` that are `inside`: of documents in order no others."""
    least = tl.min(tl.where(inside, own, 2**62), 0)
    most = tl.max(tl.where(inside, own, -(2**62)), 0)
    first, last = high, low
    for start in range(low, high, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(documents + at, mask=at < high, other=0)
        between = (at < high) & (ids >= least) & (ids <= most)
        first = tl.minimum(first, tl.min(tl.where(between, at, high), 0))
        last = tl.maximum(last, tl.max(tl.where(between, at + 1, low), 0))
    return first, last


@triton.jit
def _documents_at(documents, there, end, PACKED: tl.constexpr):
    of = there
    if PACKED:
        of = tl.load(documents + there, mask=there < end, other=0)
    return of


@triton.jit
def _tile(x, start, N: tl.constexpr, end, STRIDE: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr,
          EVEN: tl.constexpr):  # fmt: skip
    """The rows [N, D] from `start` on of a tensor whose rows lie STRIDE apart; 0 from `end` on, unless EVEN."""
    n, d = tl.arange(0, N), tl.arange(0, D)
    at = x + tl.cast(start, tl.int64) * STRIDE + (n[:, None] * STRIDE + d[None, :])
    if not EVEN:
        return tl.load(at, mask=(start + n < end)[:, None] & (d < HEAD)[None, :], other=0.0)
    elif D == HEAD:
        return tl.load(at)
    else:
        return tl.load(at, mask=(d < HEAD)[None, :], other=0.0)


@triton.jit
def _keys_of(begin, M: tl.constexpr, N: tl.constexpr, rows, keys, shift, window, documents, of_rows,
             PACKED: tl.constexpr):  # fmt: skip
    """From which key on, a multiple of N, and up to which the M rows from `begin` on see any."""
    high = tl.maximum(tl.minimum(tl.minimum(begin + M, rows) + shift, keys), 0)
    low = tl.minimum(tl.maximum(begin + shift - window + 1, 0), high)
    if PACKED:
        low, high = _with_documents(documents, of_rows, begin + tl.arange(0, M) < rows, low, high, 1024)
    return low // N * N, high


@triton.jit
def forward_kernel(
    q, k, v, row_documents, key_documents, out, lse, rows, keys, scale, slope, zero, shift, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, EVEN: tl.constexpr, CAPPED: tl.constexpr, FAST: tl.constexpr, WINDOWED: tl.constexpr,
    PACKED: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Attention of M queries of one head. Grid: (tiles of rows, sequences * heads).

    q, out: [b, rows, HEADS, HEAD]; k, v: [b, keys, KV_HEADS, HEAD]; documents: [b, rows], [b, keys]; lse: [b, HEADS,
    rows]. Query m stands at key m + shift. Scores in bits are `graded_scores` * slope + zero. EVEN: M divides rows, and
    N keys. BOUNDED: the cap is so low that 2 ** score and sums of them are numbers of q's type, and need not be divided
    by the greatest.
    """
    sequence, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # those with the most keys first
    m, n = begin + tl.arange(0, M), tl.arange(0, N)
    ACROSS: tl.constexpr = HEADS * HEAD
    STRIDE: tl.constexpr = KV_HEADS * HEAD
    own = (sequence * rows * HEADS + head) * HEAD
    queries = _tile(q + own, begin, M, rows, ACROSS, HEAD, D, EVEN)
    of_rows = _documents_at(row_documents + sequence * rows, m, rows, PACKED)
    documents = key_documents + sequence * keys
    first = (sequence * keys * KV_HEADS + head // (HEADS // KV_HEADS)) * HEAD
    top = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    weighted = tl.zeros([M, D], tl.float32)
    low, high = _keys_of(begin, M, N, rows, keys, shift, window, documents, of_rows, PACKED)
    for start in range(low, high, N):
        there = start + n
        tile = _tile(k + first, start, N, keys, STRIDE, HEAD, D, EVEN)
        values = _tile(v + first, start, N, keys, STRIDE, HEAD, D, EVEN)
        of_keys = _documents_at(documents, there, keys, PACKED)
        graded = graded_scores(tl.dot(queries, tl.trans(tile), input_precision="ieee"), scale, CAPPED, FAST)
        if PACKED or start + N > begin + shift + 1 or (WINDOWED and start < begin + M + shift - window):
            seen = _seen((m + shift - start)[:, None], n[None, :], of_rows[:, None], of_keys[None, :], keys - start,
                         window, WINDOWED, PACKED)  # fmt: skip
            graded = tl.where(seen, graded, -float("inf"))
        if BOUNDED:
            weights = powers(graded, slope, tl.zeros([1, N], tl.float32) - zero)
        else:
            now = tl.maximum(top, tl.max(graded, 1))
            base = tl.where(now == -float("inf"), 0.0, now) * slope
            weights, shrunk = powers(graded, slope, base[:, None]), powers(top, slope, base)
            total *= shrunk
            weighted *= shrunk[:, None]
            top = now
        total += tl.sum(weights, 1)
        weighted = tl.dot(weights.to(values.dtype), values, weighted, input_precision="ieee")
    result = weighted * (1 / tl.where(total > 0, total, 1.0))[:, None]
    d = tl.arange(0, D)
    at = out + own + m.to(tl.int64)[:, None] * ACROSS + d[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (d < HEAD)[None, :])
    logs = tl.log2(tl.where(total > 0, total, 1.0))
    if not BOUNDED:
        logs += top * slope + zero
    tl.store(lse + (sequence * HEADS + head) * rows + m,
             tl.where(total > 0, logs * 0.6931471805599453, -float("inf")), mask=m < rows)  # fmt: skip


@triton.jit
def query_gradient_kernel(
    dout, q, k, v, out, lse, row_documents, key_documents, dq, means, rows, keys, gain, scale, slope,
    zero, shift, window, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr, CAPPED: tl.constexpr, FAST: tl.constexpr,
    WINDOWED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The gradients of M queries, and their means of dout * out, [b, HEADS, rows]. Grid and shapes as of the forward
    kernel; gain: of the sums, with CAPPED times the derivative of scores by graded * (graded + 1)."""
    sequence, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    m, n = begin + tl.arange(0, M), tl.arange(0, N)
    ACROSS: tl.constexpr = HEADS * HEAD
    STRIDE: tl.constexpr = KV_HEADS * HEAD
    own = (sequence * rows * HEADS + head) * HEAD
    grads = _tile(dout + own, begin, M, rows, ACROSS, HEAD, D, EVEN)
    results = _tile(out + own, begin, M, rows, ACROSS, HEAD, D, EVEN)
    mean = tl.sum(grads.to(tl.float32) * results.to(tl.float32), 1)
    of_row = (sequence * HEADS + head) * rows + m
    tl.store(means + of_row, mean, mask=m < rows)
    queries = _tile(q + own, begin, M, rows, ACROSS, HEAD, D, EVEN)
    base = tl.load(lse + of_row, mask=m < rows, other=0.0) * 1.4426950408889634 - zero
    of_rows = _documents_at(row_documents + sequence * rows, m, rows, PACKED)
    documents = key_documents + sequence * keys
    first = (sequence * keys * KV_HEADS + head // (HEADS // KV_HEADS)) * HEAD
    gradient = tl.zeros([M, D], tl.float32)
    low, high = _keys_of(begin, M, N, rows, keys, shift, window, documents, of_rows, PACKED)
    for start in range(low, high, N):
        there = start + n
        tile = _tile(k + first, start, N, keys, STRIDE, HEAD, D, EVEN)
        values = _tile(v + first, start, N, keys, STRIDE, HEAD, D, EVEN)
        of_keys = _documents_at(documents, there, keys, PACKED)
        graded = graded_scores(tl.dot(queries, tl.trans(tile), input_precision="ieee"), scale, CAPPED, FAST)
        weights = powers(graded, slope, base[:, None])
        if PACKED or start + N > begin + shift + 1 or (WINDOWED and start < begin + M + shift - window):
            seen = _seen((m + shift - start)[:, None], n[None, :], of_rows[:, None], of_keys[None, :], keys - start,
                         window, WINDOWED, PACKED)  # fmt: skip
            weights = tl.where(seen, weights, 0.0)
        slopes = weights * (tl.dot(grads, tl.trans(values), input_precision="ieee") - mean[:, None])
        if CAPPED:
            slopes *= tl.fma(graded, graded, graded)
        gradient = tl.dot(slopes.to(tile.dtype), tile, gradient, input_precision="ieee")
    d = tl.arange(0, D)
    at = dq + own + m.to(tl.int64)[:, None] * ACROSS + d[None, :]
    tl.store(at, (gradient * gain).to(dq.dtype.element_ty), mask=(m < rows)[:, None] & (d < HEAD)[None, :])


@triton.jit
def key_gradient_kernel(
    dout, q, k, v, lse, row_documents, key_documents, dk, dv, means, rows, keys, gain, scale, slope,
    zero, shift, window, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr, CAPPED: tl.constexpr, FAST: tl.constexpr,
    WINDOWED: tl.constexpr, PACKED: tl.constexpr, OF_KEYS: tl.constexpr,
    OF_VALUES: tl.constexpr,
):  # fmt: skip
    """The gradients of N keys, of their values, or of both. Grid: (tiles of keys, sequences * KV heads); shapes as
    above."""
    sequence, kv = (tl.program_id(1) // KV_HEADS).to(tl.int64), tl.program_id(1) % KV_HEADS
    ACROSS: tl.constexpr = HEADS * HEAD
    STRIDE: tl.constexpr = KV_HEADS * HEAD
    GROUP: tl.constexpr = HEADS // KV_HEADS
    begin = tl.program_id(0) * N
    m, n, d = tl.arange(0, M), begin + tl.arange(0, N), tl.arange(0, D)
    own = (sequence * keys * KV_HEADS + kv) * HEAD
    tile = _tile(k + own, begin, N, keys, STRIDE, HEAD, D, EVEN)
    if OF_KEYS:
        values = _tile(v + own, begin, N, keys, STRIDE, HEAD, D, EVEN)
        of_tile = tl.zeros([N, D], tl.float32)
    if OF_VALUES:
        of_values = tl.zeros([N, D], tl.float32)
    of_keys = _documents_at(key_documents + sequence * keys, n, keys, PACKED)
    documents = row_documents + sequence * rows
    low = tl.minimum(tl.maximum(begin - shift, 0), rows)
    # behind the last query that sees one
    high = tl.maximum(tl.minimum(tl.minimum(begin + N, keys) - 1 - shift + window, rows), low)
    if PACKED:
        low, high = _with_documents(documents, of_keys, n < keys, low, high, 1024)
    low = low // M * M
    for member in range(GROUP):
        of_head = sequence * HEADS + kv * GROUP + member
        first = (sequence * rows * HEADS + kv * GROUP + member) * HEAD
        for start in range(low, high, M):
            there = start + m
            queries = _tile(q + first, start, M, rows, ACROSS, HEAD, D, EVEN)
            grads = _tile(dout + first, start, M, rows, ACROSS, HEAD, D, EVEN)
            logs = tl.load(lse + of_head * rows + there, mask=there < rows, other=0.0)
            of_rows = _documents_at(documents, there, rows, PACKED)
            graded = graded_scores(tl.dot(tile, tl.trans(queries), input_precision="ieee"), scale, CAPPED, FAST)
            weights = powers(graded, slope, (logs * 1.4426950408889634 - zero)[None, :])
            hidden = start < begin + N - 1 - shift or (WINDOWED and start + M > begin - shift + window)
            if PACKED or hidden or start + M > rows:
                seen = _seen(m[None, :], (n - shift - start)[:, None], of_rows[None, :], of_keys[:, None],
                             keys - shift - start, window, WINDOWED, PACKED)  # fmt: skip
                weights = tl.where(seen & (there < rows)[None, :], weights, 0.0)
            if OF_VALUES:
                of_values = tl.dot(weights.to(grads.dtype), grads, of_values, input_precision="ieee")
            if OF_KEYS:
                mean = tl.load(means + of_head * rows + there, mask=there < rows, other=0.0)
                slopes = weights * (tl.dot(values, tl.trans(grads), input_precision="ieee") - mean[None, :])
                if CAPPED:
                    slopes *= tl.fma(graded, graded, graded)
                of_tile = tl.dot(slopes.to(queries.dtype), queries, of_tile, input_precision="ieee")
    at = own + n.to(tl.int64)[:, None] * STRIDE + d[None, :]
    in_keys = (n < keys)[:, None] & (d < HEAD)[None, :]
    if OF_KEYS:
        tl.store(dk + at, (of_tile * gain).to(dk.dtype.element_ty), mask=in_keys)
    if OF_VALUES:
        tl.store(dv + at, of_values.to(dv.dtype.element_ty), mask=in_keys)


PARTS_OF_KEYS = {False: ("keys and values",), True: ("values", "keys")}
"""What one launch computes: for heads above 128 the registers of Hopper's hold 128 sums of one kind."""


@dataclass(frozen=True)
class FlashTile:
    """The queries and keys of a program's products."""

    rows: int
    keys: int
    warps: int
    stages: int

    @staticmethod
    def of(kernel: str, head: int, dtype: torch.dtype, capability: tuple[int, int] = (9, 0)) -> FlashTile:
        """Of `forward`, `queries` or what `PARTS_OF_KEYS` says; a test compiles them for each kind of device.

        Hopper's products want 64 rows for each four warps. 128 are as many as registers hold, and halve what is read
        from the cache; where two programs fit a multiprocessor, one computes products while the other has exponentials.
        """
        if dtype == torch.float32:
            return FlashTile(16, 16, 4, 1)
        roomy = shared_kib(capability) > 163
        tiles = {
            "forward": (128, 32, 8, 3), "queries": (128, 16, 8, 3), "keys and values": (32, 64, 4, 3 if roomy else 1),
        } if head <= 128 else {
            "forward": (128, 64, 8, 2), "queries": (128, 32, 8, 2), "values": (64, 128, 8, 2), "keys": (32, 128, 8, 2),
        } if roomy else {
            "forward": (64, 32, 4, 2), "queries": (64, 16, 4, 2), "values": (32, 64, 4, 2), "keys": (32, 64, 4, 1),
        }  # fmt: skip
        return FlashTile(*tiles[kernel])

    def sizes(self, q: Tensor, k: Tensor) -> dict[str, int | bool]:
        """The compile-time sizes for q [b,s,h,d] and k [b,t,kv,d]."""
        even = q.shape[1] % self.rows == 0 and k.shape[1] % self.keys == 0
        return {"HEADS": q.shape[2], "KV_HEADS": k.shape[2], "HEAD": q.shape[3], "M": self.rows, "N": self.keys,
                "D": max(16, triton.next_power_of_2(q.shape[3])), "EVEN": even}  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: CausalMask, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The output [b,s,h,d] and logsumexps [b,h,s] of attention from q [b,s,h,d] to k and v [b,t,kv,d]."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    b, s, h, d = q.shape
    out, lse = torch.empty_like(q), q.new_empty((b, h, s), dtype=torch.float32)
    tile = FlashTile.of("forward", d, q.dtype, capability_of(q))
    forward_kernel[triton.cdiv(s, tile.rows), b * h](
        q, k, v, *_documents(mask, q), out, lse, s, k.shape[1], *scales(scale, softcap), *_span(mask),
        **tile.sizes(q, k), **kind(mask, softcap, q.is_cuda), **own_kind("forward", softcap, q.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
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
    gain = scale if softcap is None else -4 * scale  # that of tanh is -4 * graded * (graded + 1)
    mask_kind = kind(mask, softcap, q.is_cuda)
    documents, numbers = _documents(mask, q), (s, t, gain, *scales(scale, softcap), *_span(mask))
    tile = FlashTile.of("queries", d, q.dtype, capability_of(q))
    query_gradient_kernel[triton.cdiv(s, tile.rows), b * h](
        dout, q, k, v, out, lse, *documents, dq, means, *numbers, **tile.sizes(q, k), **mask_kind,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    for which in PARTS_OF_KEYS[d > 128]:
        tile = FlashTile.of(which, d, q.dtype, capability_of(q))
        key_gradient_kernel[triton.cdiv(t, tile.keys), b * kv](
            dout, q, k, v, lse, *documents, dk, dv, means, *numbers, **tile.sizes(q, k), **mask_kind,
            **own_kind(which, softcap, q.dtype), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return dq, dk, dv


def _documents(mask: CausalMask, q: Tensor) -> tuple[Tensor, Tensor]:
    return (q, q) if mask.documents is None else (mask.documents[0].contiguous(), mask.documents[1].contiguous())


def _span(mask: CausalMask) -> tuple[int, int]:
    """How far the queries stand behind the keys, and the window."""
    return mask.queries.start - mask.keys.start, mask.window or _ALL


def own_kind(kernel: str, softcap: float | None, dtype: torch.dtype) -> dict[str, bool]:
    """The compile-time arguments that only one of the kernels has."""
    if kernel == "forward":
        return {"BOUNDED": softcap is not None and softcap * LOG2_E <= 80 and dtype != torch.float16}
    return {} if kernel == "queries" else {"OF_KEYS": kernel != "values", "OF_VALUES": kernel != "keys"}


def kind(mask: CausalMask, softcap: float | None, fast: bool) -> dict[str, bool]:
    """The compile-time arguments that all kernels have; fast: not in the interpreter."""
    packed, windowed = mask.documents is not None, mask.window is not None
    return {"CAPPED": softcap is not None, "FAST": fast, "WINDOWED": windowed, "PACKED": packed}
