"""Attention over a paged cache as one operation: it stores the new keys and values, then attends to all of the past.

    tpshard::paged_attention(q [b,t,h,d], k [b,t,kv,d], v [b,t,kv,d], k_pool [n,s,kv,d], v_pool [n,s,kv,d],
                             positions [b,t], slots [b,t], sequences [b,t], tables [m,w], scale) -> out [b,t,h,d]

A pool is n blocks of s positions each. Every row (a token) says its position, the slot (block * s + offset) where its
key and value go, and the sequence it belongs to; `tables[sequence]` lists that sequence's blocks in order. The row
attends to positions 0 .. its own. Rows of many sequences share one call, so that a chunk of a prompt and the next
tokens of others are one program. Block 0 is nobody's: padding rows write there.

A row's result depends on its own query, position and cache alone, bit for bit, whatever else is in the call: each
row's products have a shape that follows from its position only, and heads never mix, so that they can be sharded.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("tpshard", "FRAGMENT")
_library.define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor positions, "
    "Tensor slots, Tensor sequences, Tensor tables, float scale) -> Tensor"
)

_SCORES = 1 << 22
"""Scores (fp32) held at once; rows are taken in parts above that."""


def span(position: int) -> int:
    """Keys that a row at `position` reads, padding included: 64, 96, 128, 192, 256, ... Its own position decides."""
    size = 64
    while size <= position:
        if size + size // 2 > position:
            return size + size // 2
        size *= 2
    return size


def _check(q: Tensor, k: Tensor, k_pool: Tensor, v_pool: Tensor, positions: Tensor) -> None:
    (b, t, h, d), kv = q.shape, k.shape[2]
    if k.shape != (b, t, kv, d) or h % kv or k_pool.shape[2:] != (kv, d) or k_pool.shape != v_pool.shape:
        raise ValueError(
            f"paged_attention: q {list(q.shape)}, k {list(k.shape)} and a pool {list(k_pool.shape)} do not fit"
        )
    if positions.shape != (b, t):
        raise ValueError(f"paged_attention: positions {list(positions.shape)} are not [batch, rows] of {[b, t]}")
    if 32 % k_pool.shape[1]:
        raise ValueError(f"paged_attention: a block of {k_pool.shape[1]} positions does not divide 32")


def _groups(positions: list[int], sequences: list[int]) -> dict[tuple[int, int], list[int]]:
    """Rows that can be multiplied together: one span, and either one sequence (its keys are read once) or singles."""
    rows_of: dict[int, int] = {}
    for sequence in sequences:
        rows_of[sequence] = rows_of.get(sequence, 0) + 1
    groups: dict[tuple[int, int], list[int]] = {}
    for row, (position, sequence) in enumerate(zip(positions, sequences)):
        key = (span(position), sequence if rows_of[sequence] > 1 else -1)
        groups.setdefault(key, []).append(row)
    return groups


def _attend_rows(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float) -> Tensor:
    """q: [r, kv, g, d]; keys, values: [r or 1, p, kv, d]; positions: [r] -> [r, kv, g, d], all fp32"""
    r, kv, g, _ = q.shape
    p = keys.shape[1]
    scores = q.new_empty(kv, r, g, p)
    q = q * scale
    for head in range(kv):
        torch.bmm(q[:, head], keys[:, :, head].transpose(1, 2).expand(r, -1, -1), out=scores[head])
    unseen = torch.arange(p, device=q.device) > positions[:, None]
    probabilities = torch.softmax(scores.masked_fill_(unseen[None, :, None, :], float("-inf")), -1)
    out = [torch.bmm(probabilities[head], values[:, :, head].expand(r, -1, -1)) for head in range(kv)]
    return torch.stack(out, dim=1)


def _store(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    kv, d = k_pool.shape[2:]
    k_pool.view(-1, kv, d).index_copy_(0, slots.reshape(-1), k.reshape(-1, kv, d).to(k_pool.dtype))
    v_pool.view(-1, kv, d).index_copy_(0, slots.reshape(-1), v.reshape(-1, kv, d).to(v_pool.dtype))


def paged_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, positions: Tensor, slots: Tensor,
    sequences: Tensor, tables: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """The operation in plain torch, and the CPU's implementation."""
    _check(q, k, k_pool, v_pool, positions)
    _store(k, v, k_pool, v_pool, slots)
    (b, t, h, d), (_, block, kv, _) = q.shape, k_pool.shape
    rows = q.reshape(b * t, kv, h // kv, d).float()
    flat_positions, flat_sequences = positions.reshape(-1), sequences.reshape(-1)
    out = torch.empty_like(rows)
    for (p, sequence), members in _groups(flat_positions.tolist(), flat_sequences.tolist()).items():
        step = max(1, _SCORES // (h * p))
        for start in range(0, len(members), step):
            part = torch.tensor(members[start : start + step], device=q.device)
            table = tables[flat_sequences[part[:1] if sequence >= 0 else part], : p // block]
            table = torch.nn.functional.pad(table, (0, p // block - table.shape[1]))
            keys = k_pool[table].reshape(table.shape[0], p, kv, d).float()
            values = v_pool[table].reshape(table.shape[0], p, kv, d).float()
            out[part] = _attend_rows(rows[part], keys, values, flat_positions[part], scale)
    return out.reshape(b, t, h, d).to(q.dtype)


def _paged_attention_cuda(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, positions: Tensor, slots: Tensor,
    sequences: Tensor, tables: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    from tpshard.kernels import triton_paged  # needs Triton, which a CPU's torch comes without

    _check(q, k, k_pool, v_pool, positions)
    _store(k, v, k_pool, v_pool, slots)
    flat = q.reshape(-1, *q.shape[2:])
    out = triton_paged.paged_attention(
        flat, k_pool, v_pool, positions.reshape(-1), sequences.reshape(-1), tables, scale
    )
    return out.view(q.shape)


_library.impl("paged_attention", paged_attention_reference, "CPU")
_library.impl("paged_attention", _paged_attention_cuda, "CUDA")


@torch.library.register_fake("tpshard::paged_attention", lib=_library)
def _(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, positions: Tensor, slots: Tensor,
    sequences: Tensor, tables: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    _check(q, k, k_pool, v_pool, positions)
    return torch.empty_like(q)


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, positions: Tensor, slots: Tensor,
    sequences: Tensor, tables: Tensor, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """The operation; scale defaults to 1 / sqrt(head_dim). No gradient."""
    scale = scale or float(q.shape[-1]) ** -0.5
    return torch.ops.tpshard.paged_attention(
        q, k, v, k_pool, v_pool, positions, slots, sequences, tables, scale
    )  # fmt: skip
