"""How a quantized column-parallel product and the row-parallel one after it are laid out over tensor-parallel ranks.

With act-order the rows of a group lie apart. Every layout sorts them offline; they differ in how the second product's
order P2 meets the first one's outputs ("TP-aware dequantization", Hoque et al. 2024):

    naive        W1[P1, :] cut in columns, all-gather, order by P2, take the own rows, W2[P2, :] cut in rows, all-reduce
    local_sort   W1[P1, :] cut in columns, W2 cut in rows and sorted within the rank, gather locally, all-reduce
    tp_aware     W1[P1, P2] cut in columns, W2[P2, :] cut in rows, all-reduce: no gather of activations at all

Rows of W2 are cut at the ends of groups, unevenly where the groups do not divide. The functions are plain: a rank's
tensors from whole ones. All layouts are permutations of one computation and equal it up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from tpshard.kernels.quantized import Quantized, reference_matmul

Layout = Literal["naive", "local_sort", "tp_aware"]
LAYOUTS: tuple[Layout, ...] = ("naive", "local_sort", "tp_aware")
Product = Callable[[Tensor, Quantized], Tensor]


@dataclass(frozen=True)
class LocalPair:
    """One rank's part of `row(activation(column[0](x), column[1](x), ...))`.

    column: [inputs, own] each, rows sorted by group: feed x[..., input_orders[i]].
    row: [own, outputs], rows sorted by group; its bias is on rank 0 alone; results are summed over ranks.
    gathered_order: naive alone: all-gather the activations, take them in this order, and of them start:stop.
    own_order: local_sort, and attention whose order crosses heads: take the own activations in this order.
    """

    layout: Layout
    column: tuple[Quantized, ...]
    row: Quantized
    input_orders: tuple[Tensor, ...]
    start: int
    stop: int
    gathered_order: Tensor | None = None
    own_order: Tensor | None = None


def cuts(group: Tensor, ranks: int) -> list[int]:
    """Where sorted rows are cut: ranks + 1 bounds. `group` [inputs] counts up from 0 as rows are sorted.

    At ends of groups, the first ranks taking one group more where ranks do not divide them; with fewer groups than
    ranks, evenly (a group's scales are then held by several ranks).
    """
    sizes = torch.bincount(group.long())
    groups = len(sizes)
    if groups < ranks:
        return [len(group) * rank // ranks for rank in range(ranks + 1)]
    ends = [0, *torch.cumsum(sizes, 0).tolist()]
    each, more = divmod(groups, ranks)
    return [ends[rank * each + min(rank, more)] for rank in range(ranks + 1)]


def shard(layout: Layout, column: Sequence[Quantized], row: Quantized, rank: int, ranks: int) -> LocalPair:
    """A rank's part of a column-parallel product (gate and up, or one) and the row-parallel product after it.

    Raises ValueError where their sizes do not follow each other.
    """
    _check(layout, column, row, rank, ranks)
    order = row.order()
    whole = row.take_rows(order)
    bounds = cuts(whole.group, ranks)
    start, stop = bounds[rank], bounds[rank + 1]
    own = torch.arange(start, stop, device=order.device)
    if layout == "tp_aware":
        return _local(layout, column, whole, order[own], own, rank, start)
    if layout == "naive":
        return replace(_local(layout, column, whole, own, own, rank, start), gathered_order=order)
    sorted_own = torch.argsort(row.group[own], stable=True)
    return replace(_local(layout, column, row, own, own[sorted_own], rank, start), own_order=sorted_own)


def shard_attention(
    layout: Layout, q: Quantized, k: Quantized, v: Quantized, o: Quantized, head_dim: int, rank: int, ranks: int
) -> LocalPair:
    """A rank's part of attention's products: `column` is (q, k, v), `row` is o; whole heads go to a rank.

    tp_aware absorbs a head-local order of o into V's columns; where o's order crosses heads it cannot be absorbed, and
    the rank sorts locally. KV heads are replicated where `ranks` is a multiple of them. Raises ValueError where heads
    do not divide.
    """
    heads, kv_heads = q.outputs // head_dim, v.outputs // head_dim
    _check(layout, (q,), o, rank, ranks)
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError(f"{heads} heads and {kv_heads} KV heads do not divide among {ranks} ranks.")
    per_head = torch.arange(head_dim, device=o.group.device)
    own_heads = torch.arange(heads * rank // ranks, heads * (rank + 1) // ranks, device=o.group.device)
    own_kv = torch.unique(own_heads * kv_heads // heads)
    own = (own_heads[:, None] * head_dim + per_head).flatten()
    kv_columns = (own_kv[:, None] * head_dim + per_head).flatten()
    start = int(own_heads[0]) * head_dim
    inner = head_local_order(o.group, heads, kv_heads, head_dim) if layout == "tp_aware" else None
    v_columns = kv_columns
    own_order = gathered_order = None
    if inner is not None:
        v_columns = (own_kv[:, None] * head_dim + inner[own_kv]).flatten()
        rows = (own_heads[:, None] * head_dim + inner[own_heads * kv_heads // heads]).flatten()
    elif layout == "naive":
        gathered_order = o.order()
        rows = gathered_order[own]
    else:
        own_order = torch.argsort(o.group[own], stable=True)
        rows = own[own_order]
    local_o = o.take_rows(rows)
    columns = (q.take_columns(own), k.take_columns(kv_columns), v.take_columns(v_columns))
    orders = tuple(c.order() for c in columns)
    return LocalPair(
        layout,
        tuple(c.take_rows(p) for c, p in zip(columns, orders)),
        local_o if rank == 0 else replace(local_o, bias=None),
        orders,
        start,
        start + len(own),
        gathered_order,
        own_order,
    )


def head_local_order(group: Tensor, heads: int, kv_heads: int, head_dim: int) -> Tensor | None:
    """The order within heads, int64 [kv_heads, head_dim], that sorts o_proj's rows by group, one order for all query
    heads of a KV head; None where no such order exists (groups cross heads, or the heads disagree).
    """
    by_head = group.long().view(heads, head_dim)
    leaders = by_head[:: heads // kv_heads]
    inner = torch.argsort(leaders, dim=1, stable=True)
    rows = inner.repeat_interleave(heads // kv_heads, 0)
    ordered = torch.gather(by_head, 1, rows).flatten()
    runs = torch.unique_consecutive(ordered)
    return inner if len(runs) == len(torch.unique(runs)) else None


def _check(layout: str, column: Sequence[Quantized], row: Quantized, rank: int, ranks: int) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is none of {', '.join(LAYOUTS)}.")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is none of {ranks}.")
    for first in column:
        if first.outputs != row.inputs:
            raise ValueError(f"{first.outputs} outputs of the first product for {row.inputs} inputs of the second.")


def _local(
    layout: Layout, column: Sequence[Quantized], row: Quantized, columns: Tensor, rows: Tensor, rank: int, start: int
) -> LocalPair:
    local = row.take_rows(rows)
    cut = [part.take_columns(columns) for part in column]
    orders = tuple(part.order() for part in cut)
    return LocalPair(
        layout,
        tuple(part.take_rows(order) for part, order in zip(cut, orders)),
        local if rank == 0 else replace(local, bias=None),
        orders,
        start,
        start + len(rows),
    )


def arrange(local: LocalPair, own: Tensor, all_gather: Callable[[Tensor], Tensor]) -> Tensor:
    """The rank's activations [..., own] as `local.row` wants them. `all_gather` joins the ranks' last dims; only the
    naive layout calls it.
    """
    if local.gathered_order is not None:
        return all_gather(own)[..., local.gathered_order][..., local.start : local.stop]
    return own if local.own_order is None else own[..., local.own_order]


def forward(
    local: LocalPair,
    x: Tensor,
    activation: Callable[..., Tensor],
    all_gather: Callable[[Tensor], Tensor],
    all_reduce: Callable[[Tensor], Tensor],
    product: Product = reference_matmul,
) -> Tensor:
    """The pair on one rank: x [..., inputs] (whole on every rank) -> [..., outputs] (whole on every rank)."""
    first = [product(x[..., order], part) for order, part in zip(local.input_orders, local.column)]
    return all_reduce(product(arrange(local, activation(*first), all_gather), local.row))


def simulate(
    locals_: Sequence[LocalPair], x: Tensor, activation: Callable[..., Tensor], product: Product = reference_matmul
) -> Tensor:
    """All ranks of a pair in this process: what `forward` gives on each of them."""
    own = [
        activation(*(product(x[..., order], part) for order, part in zip(local.input_orders, local.column)))
        for local in locals_
    ]
    parts = [
        product(arrange(local, mine, lambda _: torch.cat(own, -1)), local.row).float()
        for local, mine in zip(locals_, own)
    ]
    return torch.stack(parts).sum(0).to(x.dtype)
