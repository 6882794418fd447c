"""Gives an indexer and attention to its selected keys, in a captured graph, their paged caches."""

from __future__ import annotations

from collections.abc import Sequence

from tpshard.kernels.paged_selection import PAGED_SELECT, PAGED_SELECTED, SELECT, SELECTED
from tpshard.parallelism.graph import Op, Ref, Value

SELECTING = (SELECT, SELECTED)


def attentions_of(pools: Sequence[Value]) -> int:
    """The number of attentions that have their caches."""
    return sum(pool.name.endswith(".k") for pool in pools)


def page_selection(op: Op, pools: Sequence[Value], rows: Sequence[Value], block_size: int) -> list[Value]:
    """Turns an operation of `SELECTING` into its paged one, in place, and returns its caches, each with one block.

    pools: the caches of operations before it. rows: positions, slots, sequences and tables.
    """
    q, k, third, *indices = op.operands
    selects = op.target is SELECT
    stored = {"index": k} if selects else {"k": k, "v": third}
    own = [
        Value(f"layers.{attentions_of(pools)}.cache.{name}", (1, block_size, *x.shape[2:]), x.dtype)
        for name, x in stored.items()
    ]
    how = op.args[len(op.operands) :]
    op.target = PAGED_SELECT if selects else PAGED_SELECTED
    op.operands = [q, k, third, *own, *rows, *indices]
    op.args = (*(Ref(i) for i in range(len(op.operands))), *how)
    return own
