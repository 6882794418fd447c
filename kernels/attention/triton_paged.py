"""Attention over a paged KV cache in Triton, one program per row and KV head."""

# mypy: allow-untyped-defs, allow-untyped-calls
# (kernel arguments are Triton's own values, typed at launch)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_KEYS = 64
"""Keys per step of the loop."""
_ALL = 2**30
"""The window that stands for none."""


@triton.jit
def paged_attention_kernel(
    q, k_pool, v_pool, positions, sequences, tables, out, lse, scale, width, kv_heads, window, softcap,
    GROUP: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    CAPPED: tl.constexpr, WITH_LSE: tl.constexpr,
):  # fmt: skip
    """Attention of one row and KV head, with an online softmax in fp32 (Milakov and Gimelshein 2018).

    q, out: [rows, kv_heads * GROUP, HEAD]; pools: [blocks, BLOCK, kv_heads, HEAD]; tables: [sequences, width]; lse:
    [rows, kv_heads * GROUP], written with WITH_LSE. The loop runs from the start of the row's window to its position,
    so that only the row decides the order of its sums.
    """
    row, kv = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    table = tables + tl.load(sequences + row) * width
    member, d, key = tl.arange(0, M), tl.arange(0, D), tl.arange(0, KEYS)
    inside = (member[:, None] < GROUP) & (d[None, :] < HEAD)
    place = ((row * kv_heads + kv) * GROUP + member[:, None]).to(tl.int64) * HEAD + d[None, :]
    queries = tl.load(q + place, mask=inside, other=0.0)
    largest = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    weighted = tl.zeros([M, D], tl.float32)
    first = tl.maximum(position - window + 1, 0)
    for start in range(first, position + 1, KEYS):
        at = start + key
        visible = at <= position
        block = tl.load(table + at // BLOCK, mask=visible, other=0)
        slot = ((block * BLOCK + at % BLOCK) * kv_heads + kv).to(tl.int64)
        cut = visible[:, None] & (d[None, :] < HEAD)
        keys = tl.load(k_pool + slot[:, None] * HEAD + d[None, :], mask=cut, other=0.0)
        values = tl.load(v_pool + slot[:, None] * HEAD + d[None, :], mask=cut, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # tanh
        scores = tl.where(visible[None, :], scores, -float("inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - now[:, None])
        shrunk = tl.exp(largest - now)
        total = total * shrunk + tl.sum(weights, 1)
        weighted = weighted * shrunk[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        largest = now
    result = weighted / total[:, None]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
    if WITH_LSE:
        tl.store(lse + (row * kv_heads + kv) * GROUP + member, largest + tl.log(total), mask=member < GROUP)


def paged_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, positions: Tensor, sequences: Tensor, tables: Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The output of q [rows, heads, head_dim], in its shape, and the logsumexps [rows, heads] in fp32 if asked for.

    The pools must hold the new keys. Does not synchronize with the host.
    """
    rows, heads, head_dim = q.shape
    block, kv_heads = k_pool.shape[1:3]
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    group = heads // kv_heads
    lse = q.new_empty((rows, heads), dtype=torch.float32) if with_lse else None
    paged_attention_kernel[rows, kv_heads](
        q, k_pool, v_pool, positions.contiguous(), sequences.contiguous(), tables.contiguous(), out,
        out if lse is None else lse, scale, tables.shape[1], kv_heads, _ALL if window is None else window,
        softcap or 1.0, GROUP=group, HEAD=head_dim, BLOCK=block, KEYS=_KEYS, M=max(16, triton.next_power_of_2(group)),
        D=max(16, triton.next_power_of_2(head_dim)), CAPPED=softcap is not None, WITH_LSE=with_lse,
    )  # fmt: skip
    return out, lse
