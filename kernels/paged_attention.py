"""Attention over a paged KV cache as one operation: it stores the new keys and values, then attends to all of the past.

    tpshard::paged_attention(q [b,t,h,d], k [b,t,kv,d], v [b,t,kv,d], k_pool [n,s,kv,d], v_pool [n,s,kv,d],
                             positions [b,t], slots [b,t], sequences [b,t], tables [m,w], scale, window | None,
                             softcap | None)
        -> out [b,t,h,d]
    tpshard::paged_attention_lse(the same) -> (out, lse [b,h,t] fp32, the logsumexp of each row's scores)

A pool is n blocks of s positions. Each row is a token, with its position, the slot (block * s + offset) for its key and
value, and its sequence; `tables[sequence]` lists that sequence's blocks in order. The row attends to positions 0 up to
its own, with a `window` only to the last `window` of them. With a `softcap` c, scores x become c * tanh(x / c). Rows of
many sequences share one call, so that one program computes a chunk of a prompt and the next tokens of other sequences.
Block 0 belongs to no sequence: padding rows write to it.

A row's result depends only on its own query, position and cache, bit for bit: the shape of its matrix products follows
from its position, and heads are independent, so that they can be sharded. Values after its position never reach it, not
even a NaN that another sequence left there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tpshard.kernels.attention_mask import cap
from tpshard.kernels.operation import operation

_SCORES = 1 << 22
"""fp32 scores held at once; above that, the rows are computed in several parts."""


def span(position: int) -> int:
    """The number of keys that a row at `position` reads, with padding: 64, 96, 128, 192, 256, ...

    It depends on the position alone, so that a row's bits do not depend on the other rows.
    """
    size = 64
    while size <= position:
        if size + size // 2 > position:
            return size + size // 2
        size *= 2
    return size


def _check(q: Tensor, k: Tensor, k_pool: Tensor, v_pool: Tensor, positions: Tensor, window: int | None) -> None:
    (b, t, h, d), kv = q.shape, k.shape[2]
    if k.shape != (b, t, kv, d) or h % kv or k_pool.shape[2:] != (kv, d) or k_pool.shape != v_pool.shape:
        raise ValueError(
            f"paged_attention: the shapes of q {list(q.shape)}, k {list(k.shape)} and the pools {list(k_pool.shape)}, "
            f"{list(v_pool.shape)} do not match"
        )
    if positions.shape != (b, t):
        raise ValueError(f"paged_attention: positions {list(positions.shape)} must be [batch, rows] = {[b, t]}")
    if 32 % k_pool.shape[1]:
        raise ValueError(f"paged_attention: the block size {k_pool.shape[1]} must divide 32")
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: window is {window}; it must be at least 1, the row's own position")


@dataclass(frozen=True)
class RowGroup:
    """Rows that are multiplied at once; all read `span` keys. If `shared`, they are of one sequence, whose keys
    are read once; else each row has keys of its own."""

    rows: Tensor
    """[r]"""
    span: int
    entries: Tensor
    """[m * kv * span]: indices of the keys and values in a pool viewed as [n * s * kv, d]; m is 1 where shared, else r.
    Places after the last position repeat it: a masked value is multiplied by 0, and 0 * NaN is NaN."""
    unseen: Tensor
    """[r, 1, 1, span]: true for keys after the row's own position, or before its window."""
    shared: bool


@lru_cache(maxsize=4)
def _parts(
    positions: bytes, sequences: bytes, tables: bytes, block: int, heads: int, kv: int, window: int | None
) -> tuple[RowGroup, ...]:
    """The parts in which rows with these positions and sequences (int64) are multiplied.

    Cached, since every layer of a step asks for the same. `tables` is int64 [sequences, blocks], flattened.
    """
    position, sequence = (np.frombuffer(x, dtype=np.int64) for x in (positions, sequences))
    table = np.frombuffer(tables, dtype=np.int64).reshape(sequence.max() + 1, -1)
    many = np.bincount(sequence)[sequence] > 1
    groups: dict[tuple[int, int], list[int]] = {}
    for row, (at, sequence_id, shared) in enumerate(zip(position.tolist(), sequence.tolist(), many.tolist())):
        groups.setdefault((span(at), sequence_id if shared else -1), []).append(row)
    parts = []
    for (p, sequence_id), members in groups.items():
        step = max(1, _SCORES // (heads * p))
        for rows in (np.array(members[start : start + step]) for start in range(0, len(members), step)):
            one = sequence_id >= 0
            last = position[rows].max(keepdims=True) if one else position[rows]
            at = np.minimum(np.arange(p), last[:, None])  # [m, span]
            own = position[rows, None, None, None]
            first = own * 0 if window is None else np.maximum(own - window + 1, 0)
            if not one:
                at = np.maximum(at, first[:, 0, 0])
            blocks = np.take_along_axis(table[[sequence_id] if one else sequence[rows]], at // block, 1)
            slots = (blocks * block + at % block)[:, None]
            entries = torch.from_numpy(slots * kv + np.arange(kv)[:, None]).flatten()  # of [m, kv, span]
            unseen = torch.from_numpy((np.arange(p) > own) | (np.arange(p) < first))
            parts.append(RowGroup(torch.from_numpy(rows), p, entries, unseen, one))
    return tuple(parts)


def _attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, part: RowGroup, softcap: float | None, lse: Tensor | None
) -> Tensor:
    """Attention of one part: q [r, kv, g, d], scaled; keys, values [m * kv, span, d] -> [r, kv, g, d], all fp32.

    Writes the logsumexps of the scores to `lse` [r, kv, g], if it is given.
    """
    r, kv, g, d = q.shape
    turned, unseen = keys.transpose(1, 2), part.unseen.to(q.device)
    if not part.shared:
        scores = cap(torch.bmm(q.reshape(r * kv, g, d), turned), softcap).view(r, kv, g, part.span)
        scores = scores.masked_fill_(unseen, float("-inf"))
        if lse is not None:
            torch.logsumexp(scores, -1, out=lse)
        probabilities = torch.softmax(scores, -1)
        return torch.bmm(probabilities.view(r * kv, g, part.span), values).view(r, kv, g, d)
    scores = q.new_empty(kv, r, g, part.span)
    for head in range(kv):
        torch.bmm(q[:, head], turned[head].expand(r, -1, -1), out=scores[head])
    scores = cap(scores, softcap).masked_fill_(unseen.transpose(0, 1), float("-inf"))
    if lse is not None:
        torch.logsumexp(scores.transpose(0, 1), -1, out=lse)
    probabilities = torch.softmax(scores, -1)
    if not values.sum().isfinite():  # rows share these values, and some may not attend to the one that is not finite
        visible_values = (values.masked_fill(hidden.view(-1, 1), 0) for hidden in unseen)
        return torch.stack([torch.bmm(probabilities[:, i], own) for i, own in enumerate(visible_values)])
    return torch.stack([torch.bmm(probabilities[i], values[i].expand(r, -1, -1)) for i in range(kv)], dim=1)


def parts_of(
    positions: Tensor, sequences: Tensor, tables: Tensor, block: int, heads: int, kv: int, window: int | None
) -> tuple[RowGroup, ...]:
    """The parts in which rows [b, t] with these positions and sequences are multiplied; the host reads all three."""
    index_tensors = (positions.reshape(-1), sequences.reshape(-1), tables[: int(sequences.max()) + 1])
    return _parts(*(x.cpu().contiguous().numpy().tobytes() for x in index_tensors), block, heads, kv, window)


def store(x: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Writes x [b,t,kv,d] to the slots [b,t] of a pool [n,s,kv,d]."""
    kv, d = pool.shape[2:]
    pool.view(-1, kv, d).index_copy_(0, slots.reshape(-1), x.reshape(-1, kv, d).to(pool.dtype))


def paged_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, positions: Tensor, slots: Tensor,
    sequences: Tensor, tables: Tensor, scale: float, window: int | None = None,
    softcap: float | None = None, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`tpshard::paged_attention` in plain torch; writes into the pools, and the logsumexps to `lse` [b,h,t]."""
    _check(q, k, k_pool, v_pool, positions, window)
    store(k, k_pool, slots)
    store(v, v_pool, slots)
    (b, t, h, d), (_, block, kv, _) = q.shape, k_pool.shape
    rows = q.reshape(b * t, kv, h // kv, d).float() * scale
    out = torch.empty_like(rows)
    logs = None if lse is None else out.new_empty(rows.shape[:-1])
    for part in parts_of(positions, sequences, tables, block, h, kv, window):
        entries, members = part.entries.to(q.device), part.rows.to(q.device)
        keys, values = (
            pool.view(-1, d).index_select(0, entries).float().view(-1, part.span, d) for pool in (k_pool, v_pool)
        )
        part_logs = None if logs is None else logs.new_empty(len(members), kv, h // kv)
        out[members] = _attend_rows(rows[members], keys, values, part, softcap, part_logs)
        if logs is not None and part_logs is not None:
            logs[members] = part_logs
    if lse is not None and logs is not None:
        lse.copy_(logs.reshape(b, t, h).transpose(1, 2))
    return out.reshape(b, t, h, d).to(q.dtype)


def _paged_attention_cuda(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, positions: Tensor, slots: Tensor,
    sequences: Tensor, tables: Tensor, scale: float, window: int | None = None,
    softcap: float | None = None, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from tpshard.kernels import triton_paged  # needs Triton, which CPU builds of torch lack

    _check(q, k, k_pool, v_pool, positions, window)
    store(k, k_pool, slots)
    store(v, v_pool, slots)
    flat = q.reshape(-1, *q.shape[2:])
    out, logs = triton_paged.paged_attention(
        flat, k_pool, v_pool, positions.reshape(-1), sequences.reshape(-1), tables, scale, window, softcap,
        lse is not None,
    )  # fmt: skip
    if lse is not None and logs is not None:
        lse.copy_(logs.view(*q.shape[:3]).transpose(1, 2))
    return out.view(q.shape)


def _with_lse(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`tpshard::paged_attention_lse` by a function that writes logsumexps to its argument `lse`."""

    def attend_with_lse(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        lse = _new_lse(q)
        return attend(q, *args, lse=lse), lse

    return attend_with_lse


def _new_lse(q: Tensor) -> Tensor:
    b, t, h, _ = q.shape
    return q.new_empty((b, h, t), dtype=torch.float32)


def _shape(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, positions: Tensor, slots: Tensor,
    sequences: Tensor, tables: Tensor, scale: float, window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    _check(q, k, k_pool, v_pool, positions, window)
    return torch.empty_like(q)


def _shapes_with_lse(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _shape(q, *rest), _new_lse(q)


_ARGUMENTS = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor positions, Tensor slots, "
    "Tensor sequences, Tensor tables, float scale, int? window=None, float? softcap=None)"
)
PAGED = operation(
    f"paged_attention{_ARGUMENTS} -> Tensor", paged_attention_reference, _shape, cuda=_paged_attention_cuda
)
PAGED_LSE = operation(
    f"paged_attention_lse{_ARGUMENTS} -> (Tensor, Tensor)", _with_lse(paged_attention_reference), _shapes_with_lse,
    cuda=_with_lse(_paged_attention_cuda),
)  # fmt: skip
