"""Caches with the past of several sequences."""

from __future__ import annotations

import torch


def fill(lengths: list[int], kv: int, d: int, block: int = 16) -> tuple[torch.Tensor, ...]:
    """Cache pools with the past of sequences of these lengths in shuffled blocks, and their keys and values."""
    torch.manual_seed(sum(lengths))
    width = max(-(-n // block) for n in lengths)
    order = torch.randperm(width * len(lengths)) + 1
    tables = order.reshape(len(lengths), width)
    pools = torch.zeros(2, width * len(lengths) + 1, block, kv, d)
    past = torch.randn(2, len(lengths), max(lengths), kv, d)
    for i, n in enumerate(lengths):
        for p in range(n):
            pools[:, tables[i, p // block], p % block] = past[:, i, p]
    return tables, pools, past
