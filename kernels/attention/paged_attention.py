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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels.attention.attention_mask import cap
from tpshard.kernels.operation import operation

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
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
    blocks: Tensor
    """[m * span / s]: the blocks of a pool [n, s, kv, d] that hold the keys and values; m is 1 where shared, else r."""
    unseen: Tensor
    """[r, 1, 1, span]: true for keys after the row's own position, or before its window."""
    bias: Tensor
    """[r, 1, 1, span], fp32: -inf where `unseen`, else 0."""
    shared: bool


@lru_cache(maxsize=4)
def _parts(
    positions: bytes, sequences: bytes, tables: bytes, block: int, heads: int, window: int | None
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
            own = position[rows, None]
            first = own * 0 if window is None else np.maximum(own - window + 1, 0)
            # blocks that no row reads are not read: others may write to them
            low, high = (first.min(keepdims=True), own.max(keepdims=True)) if one else (first, own)
            places = np.clip(np.arange(p // block), low // block, high // block)  # [m, span / s]
            blocks = np.take_along_axis(table[[sequence_id] if one else sequence[rows]], places, 1)
            unseen = torch.from_numpy((np.arange(p) > own) | (np.arange(p) < first))[:, None, None]
            bias = torch.zeros(unseen.shape).masked_fill_(unseen, float("-inf"))
            parts.append(RowGroup(torch.from_numpy(rows), p, torch.from_numpy(blocks).flatten(), unseen, bias, one))
    return tuple(parts)


def _attend_rows(q: Tensor, keys: Tensor, values: Tensor, part: RowGroup, scale: float, lse: Tensor | None) -> Tensor:
    """Attention of one part: q [r, kv, g, d]; keys, values [m, kv, span, d] -> [r, kv, g, d], all fp32.

    Writes the logsumexps of the scores to `lse` [r, kv, g], if it is given.
    """
    if q.shape[2] % 2:
        # torch gives each thread a buffer whose place, and with it the order of some libraries' sums, is even only for
        # an even number of queries: a row's bits would depend on the thread, so on the other rows
        logs = None if lse is None else q.new_empty(*q.shape[:2], q.shape[2] + 1)
        out = _attend_rows(F.pad(q, (0, 0, 0, 1)), keys, values, part, scale, logs)
        if lse is not None and logs is not None:
            lse.copy_(logs[:, :, :-1])
        return out[:, :, :-1]
    r = len(q)
    out, logs = FLASH(q, keys.expand(r, -1, -1, -1), values.expand(r, -1, -1, -1), attn_mask=part.bias, scale=scale)
    if not math.isfinite(out.sum()):
        # a key or value to which a row may not attend may be infinite or NaN, which a weight of 0 does not hide
        each = 1 if part.shared else r
        parts = []
        for own, bias in zip(q.split(each), part.bias.split(each)):
            hidden = bias.view(each, 1, -1, 1) < 0
            stored = (x.masked_fill(hidden, 0) for x in (keys, values))
            parts.append(FLASH(own, *stored, attn_mask=bias, scale=scale))
        out, logs = (torch.cat(results) for results in zip(*parts))
    if lse is not None:
        lse.copy_(logs)
    return out


def _attend_capped(
    q: Tensor, keys: Tensor, values: Tensor, part: RowGroup, scale: float, softcap: float, lse: Tensor | None
) -> Tensor:
    """`_attend_rows` with a softcap, which no operation of torch has."""
    (r, kv, g, d), span = q.shape, part.span
    keys, values, unseen = (x.expand(r, *x.shape[1:]) for x in (keys, values, part.unseen))
    values = values.masked_fill(unseen.view(r, 1, span, 1), 0)  # 0 * NaN is NaN
    scores = torch.bmm((q * scale).view(r * kv, g, d), keys.reshape(r * kv, span, d).transpose(1, 2))
    scores = cap(scores, softcap).view(r, kv, g, span).masked_fill_(unseen, float("-inf"))
    if lse is not None:
        torch.logsumexp(scores, -1, out=lse)
    probabilities = torch.softmax(scores, -1).view(r * kv, g, span)
    return torch.bmm(probabilities, values.reshape(r * kv, span, d)).view(r, kv, g, d)


def parts_of(
    positions: Tensor, sequences: Tensor, tables: Tensor, block: int, heads: int, window: int | None
) -> tuple[RowGroup, ...]:
    """The parts in which rows [b, t] with these positions and sequences are multiplied; the host reads all three."""
    index_tensors = (positions.reshape(-1), sequences.reshape(-1), tables[: int(sequences.max()) + 1])
    return _parts(*(x.cpu().contiguous().numpy().tobytes() for x in index_tensors), block, heads, window)


def gathered_rows(pool: Tensor, part: RowGroup) -> Tensor:
    """The keys or values of a part out of a pool [n, s, kv, d]: [m, span, kv, d] in fp32."""
    blocks = pool.reshape(len(pool), -1).index_select(0, part.blocks.to(pool.device))
    return blocks.float().view(-1, part.span, *pool.shape[2:])


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
    rows = q.reshape(b * t, kv, h // kv, d).float()
    parts = parts_of(positions, sequences, tables, block, h, window)
    outs, logs = [], []
    for part in parts:
        own = rows if len(parts) == 1 else rows.index_select(0, part.rows)
        keys, values = (gathered_rows(pool, part).transpose(1, 2) for pool in (k_pool, v_pool))
        own_logs = None if lse is None else own.new_empty(own.shape[:-1])
        if softcap is None:
            outs.append(_attend_rows(own, keys, values, part, scale, own_logs))
        else:
            outs.append(_attend_capped(own, keys, values, part, scale, softcap, own_logs))
        logs.append(own_logs)
    if lse is not None:
        lse.copy_(_in_order(parts, logs).reshape(b, t, h).transpose(1, 2))
    return _in_order(parts, outs).reshape(b, t, h, d).to(q.dtype)


def _in_order(parts: Sequence[RowGroup], results: list[Any]) -> Tensor:
    """The results of all parts' rows, in the order of the rows."""
    if len(parts) == 1:  # its rows are in order
        return results[0]
    together = torch.cat(results)
    return torch.empty_like(together).index_copy_(0, torch.cat([part.rows for part in parts]), together)


def _paged_attention_cuda(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, positions: Tensor, slots: Tensor,
    sequences: Tensor, tables: Tensor, scale: float, window: int | None = None,
    softcap: float | None = None, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from tpshard.kernels import triton_launch  # needs Triton, which CPU builds of torch lack
    from tpshard.kernels.attention import triton_paged

    _check(q, k, k_pool, v_pool, positions, window)
    flat = q.reshape(-1, *q.shape[2:])
    with torch.cuda.device(q.device):
        triton_launch.store_rows(k, v, k_pool, v_pool, slots)
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
