"""An operation that permutes a linear's inputs (act-order), so that a program shows each permutation and its cost.

    tpshard::reorder(x [..., n], order [n] int64, blocks) -> [..., n]

The last dim is `blocks` equal parts, each permuted by itself: with s = n / blocks,
out[..., b * s + j] = x[..., b * s + order[b * s + j]]. One block allows any permutation. With a block per device,
elements stay on their device; with a block per head, in their head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tpshard.kernels.operation import operation


def sorting(group: Tensor, blocks: int = 1) -> Tensor:
    """The order [n] int64 that sorts `group` [n] stably within each of `blocks` equal parts."""
    return torch.argsort(group.view(blocks, -1), dim=1, stable=True).flatten()


def positions(order: Tensor, blocks: int = 1) -> Tensor:
    """An order within blocks as positions in the whole dim, int64 [n]."""
    parts = order.view(blocks, -1)
    return (parts + torch.arange(blocks, device=order.device)[:, None] * parts.shape[1]).flatten()


def merge_blocks(order: Tensor, blocks: int, block_count: int) -> Tensor:
    """Merges neighbouring blocks with equal orders: the order of `block_count` blocks out of one of `blocks`."""
    return order.view(block_count, blocks // block_count, -1)[:, 0].flatten()


def head_local_order(group: Tensor, heads: int, kv_heads: int, head_dim: int) -> Tensor | None:
    """The order within heads, int64 [kv_heads, head_dim], that sorts o_proj's rows by group.

    All query heads of a KV head share one order. None where no such order exists: groups cross heads, or heads
    disagree.
    """
    by_head = group.long().view(heads, head_dim)
    leaders = by_head[:: heads // kv_heads]
    inner = torch.argsort(leaders, dim=1, stable=True)
    rows = inner.repeat_interleave(heads // kv_heads, 0)
    ordered = torch.gather(by_head, 1, rows).flatten()
    runs = torch.unique_consecutive(ordered)
    return inner if len(runs) == len(torch.unique(runs)) else None


def _reorder(x: Tensor, order: Tensor, blocks: int) -> Tensor:
    return x.index_select(-1, order if blocks == 1 else positions(order, blocks))


def _cuda(x: Tensor, order: Tensor, blocks: int) -> Tensor:
    from tpshard.kernels import triton_launch  # needs Triton, which CPU builds of torch lack

    with torch.cuda.device(x.device):
        return triton_launch.reorder(x, order, blocks)


def _shape(x: Tensor, order: Tensor, blocks: int) -> Tensor:
    return torch.empty_like(x)


REORDER = operation("reorder(Tensor x, Tensor order, int blocks) -> Tensor", _reorder, _shape, cuda=_cuda)
