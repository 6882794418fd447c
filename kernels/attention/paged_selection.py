"""Attention over a paged cache to a few keys per row, which an indexer selects: DeepSeek-V3.2's sparse attention.

    tpshard::paged_select_keys(q [b,t,h,d], k [b,t,1,d], weights [b,t,h], pool [n,s,1,d], positions [b,t], slots [b,t],
                               sequences [b,t], tables [m,w], scale, count) -> indices [b,t,count] int32
    tpshard::paged_selected_attention(q [b,t,h,d], k [b,t,kv,d], v [b,t,kv,e], k_pool [n,s,kv,d], v_pool [n,s,kv,e],
                                      positions, slots, sequences, tables, indices [b,t,count], scale)
        -> (out [b,t,h,e], lse [b,h,t] fp32, the logsumexp of each row's scores)

Rows, slots, sequences and tables are those of `paged_attention`. The first stores the indexer's keys and scores the
row's sequence up to its own position: the score of position j is sum over heads i of weights[i] * relu(scale * q[i] .
k[j]), in fp32. `indices` are the `count` positions with the highest scores, highest first; where a row has fewer
positions, -1 follows them. The second attends to these positions alone.

A row's result depends only on its own queries, position and cache, bit for bit, as with `paged_attention`. Of positions
with equal scores at the boundary, `torch.topk` decides which are selected, and so it does in transformers.

The two operations without `paged_`, `tpshard::select_keys` and `tpshard::selected_attention`, have neither cache nor
kernels: they stand in a captured graph until `tpshard.programs.server.paging` gives them a cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tpshard.kernels.attention.paged_attention import gathered_rows, parts_of, span, store
from tpshard.kernels.operation import operation

_GATHERED = 1 << 24
"""Elements of keys and values gathered at once; above that, the rows are computed in several parts."""


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention to the selected keys: q [b,s,h,d], k [b,s,kv,d], v [b,s,kv,e], indices [b,s,count] ->
    [b,s,h,e]. sinks: [h], scores of a further key per head, whose value is zero."""
    out, lse = SELECTED(q, k, v, indices, scale)
    if sinks is None:
        return out  # type: ignore[no-any-return]
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])  # of the other keys in the softmax
    return out * share.transpose(1, 2).unsqueeze(-1).to(out.dtype)  # type: ignore[no-any-return]


def _check_keys(q: Tensor, k: Tensor, weights: Tensor, pool: Tensor, count: int) -> None:
    b, t, h, d = q.shape
    if k.shape != (b, t, 1, d) or weights.shape != (b, t, h) or pool.shape[2:] != (1, d) or 32 % pool.shape[1]:
        raise ValueError(
            f"paged_select_keys: the shapes of q {list(q.shape)}, k {list(k.shape)}, weights {list(weights.shape)} and "
            f"the pool {list(pool.shape)} do not match"
        )
    if count < 1:
        raise ValueError(f"paged_select_keys: count is {count}; it must be at least 1")


def select_keys_reference(
    q: Tensor, k: Tensor, weights: Tensor, pool: Tensor, positions: Tensor, slots: Tensor, sequences: Tensor,
    tables: Tensor, scale: float, count: int,
) -> Tensor:  # fmt: skip
    """`tpshard::paged_select_keys` in plain torch; writes into the pool."""
    _check_keys(q, k, weights, pool, count)
    store(k, pool, slots)
    b, t, h, d = q.shape
    queries, weights = q.reshape(b * t, h, d).float(), weights.reshape(b * t, 1, h).float()
    indices = positions.new_full((b * t, count), -1, dtype=torch.int32)
    for part in parts_of(positions, sequences, tables, pool.shape[1], h, None):
        rows, unseen = part.rows.to(q.device), part.unseen.to(q.device).view(-1, part.span)
        keys = gathered_rows(pool, part).squeeze(2)
        scores = torch.bmm(queries[rows], keys.transpose(1, 2).expand(len(rows), -1, -1)).mul_(scale).relu_()
        total = torch.bmm(weights[rows], scores).squeeze(1).masked_fill_(unseen, float("-inf"))
        best = total.topk(min(count, part.span), -1).indices
        indices[rows, : best.shape[1]] = best.to(torch.int32).masked_fill_(unseen.gather(1, best), -1)
    return indices.view(b, t, count)


def _check_attention(q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, indices: Tensor) -> None:
    (b, t, h, d), kv = q.shape, k.shape[2]
    fits = k.shape == (b, t, kv, d) and v.shape[:3] == (b, t, kv) and h % kv == 0 and indices.shape[:2] == (b, t)
    if not fits or k_pool.shape[2:] != (kv, d) or v_pool.shape != (*k_pool.shape[:3], v.shape[3]):
        raise ValueError(
            f"paged_selected_attention: the shapes of q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, the "
            f"pools {list(k_pool.shape)}, {list(v_pool.shape)} and indices {list(indices.shape)} do not match"
        )


def selected_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, positions: Tensor, slots: Tensor,
    sequences: Tensor, tables: Tensor, indices: Tensor, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`tpshard::paged_selected_attention` in plain torch; writes into the pools."""
    _check_attention(q, k, v, k_pool, v_pool, indices)
    store(k, k_pool, slots)
    store(v, v_pool, slots)
    (b, t, h, d), (_, block, kv, e), count = q.shape, v_pool.shape, indices.shape[2]
    queries = q.reshape(b * t, kv, h // kv, d).float() * scale
    out, lse = queries.new_empty(b * t, kv, h // kv, e), queries.new_empty(b * t, kv, h // kv)
    heads = torch.arange(kv, device=q.device).unsqueeze(1)
    table, selected = tables[sequences.reshape(-1)], indices.reshape(b * t, count).long()
    members: dict[int, list[int]] = {}
    for row, position in enumerate(positions.reshape(-1).tolist()):
        members.setdefault(min(span(position), count), []).append(row)
    for width, group in members.items():
        for rows in torch.tensor(group, device=q.device).split(max(1, _GATHERED // (width * kv * (d + e)))):
            chosen = selected[rows, :width]
            absent = chosen < 0
            chosen = torch.where(absent, chosen[:, :1], chosen)  # a weight of 0 times NaN is NaN
            place = table[rows].gather(1, chosen // block) * block + chosen % block
            entries = (place.unsqueeze(1) * kv + heads).flatten()  # of [rows, kv, width]
            keys, values = (
                pool.view(-1, pool.shape[3]).index_select(0, entries).float().view(-1, width, pool.shape[3])
                for pool in (k_pool, v_pool)
            )
            scores = torch.bmm(queries[rows].view(-1, h // kv, d), keys.transpose(1, 2)).view(-1, kv, h // kv, width)
            scores = scores.masked_fill_(absent[:, None, None], float("-inf"))
            lse[rows] = scores.logsumexp(-1)
            out[rows] = torch.bmm(scores.softmax(-1).view(-1, h // kv, width), values).view(-1, kv, h // kv, e)
    return out.reshape(b, t, h, e).to(q.dtype), lse.view(b, t, h).transpose(1, 2).contiguous()


def _indices(q: Tensor, k: Tensor, weights: Tensor, scale: float, count: int) -> Tensor:
    return q.new_empty((*q.shape[:2], count), dtype=torch.int32)


def _attended(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    b, t, h, _ = q.shape
    return q.new_empty((b, t, h, v.shape[3])), q.new_empty((b, h, t), dtype=torch.float32)


def _paged_indices(q: Tensor, k: Tensor, weights: Tensor, pool: Tensor, *rest: Any) -> Tensor:
    *_, scale, count = rest
    _check_keys(q, k, weights, pool, count)
    return _indices(q, k, weights, scale, count)


def _paged_attended(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    *_, indices, scale = rest
    _check_attention(q, k, v, k_pool, v_pool, indices)
    return _attended(q, k, v, indices, scale)


_ROWS = "Tensor positions, Tensor slots, Tensor sequences, Tensor tables"
SELECT = operation("select_keys(Tensor q, Tensor k, Tensor weights, float scale, int count) -> Tensor", shapes=_indices)
SELECTED = operation(
    "selected_attention(Tensor q, Tensor k, Tensor v, Tensor indices, float scale) -> (Tensor, Tensor)",
    shapes=_attended,
)  # fmt: skip
PAGED_SELECT = operation(
    f"paged_select_keys(Tensor q, Tensor k, Tensor weights, Tensor(a!) pool, {_ROWS}, float scale, int count) -> "
    "Tensor",
    select_keys_reference, _paged_indices,
)  # fmt: skip
PAGED_SELECTED = operation(
    f"paged_selected_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, {_ROWS}, "
    "Tensor indices, float scale) -> (Tensor, Tensor)",
    selected_attention_reference, _paged_attended,
)  # fmt: skip
