"""The rules of operations on a paged cache: heads of attention may be sharded, rows and blocks not.

Rows write to the pools, so that every device with a KV head needs all rows. Query heads are KV heads k times groups g:
more devices than KV heads shard g and replicate the KV heads with their pools. FLOPs are those of the present blocks,
or of one if their number is free.
"""

from __future__ import annotations

from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.entry import Table
from tpshard.parallelism.rules.letters import letters

CALLS = 11
"""Library operations that a CPU runs for one call in which all rows read equally many blocks."""
ROWS = "BT,BT,BT,MW"
"""The positions, slots and sequences of the rows, and the tables of blocks of all sequences."""


def attention_flops(op: Op) -> int:
    """The FLOPs of attention to all keys of a sequence, or to those of its window."""
    cached = op.operands[8].shape[1] * op.operands[3].shape[1]
    window = op.args[10] if len(op.args) > 10 and op.args[10] is not None else cached
    return 4 * op.operands[0].numel * min(cached, window)


def select_flops(op: Op) -> int:
    """The FLOPs of an indexer, which scores all keys of a sequence."""
    q, _, weights, pool = op.operands[:4]
    return 2 * (q.numel + weights.numel) * op.operands[7].shape[1] * pool.shape[1]


def selected_flops(op: Op) -> int:
    """The FLOPs of attention to the selected keys."""
    q, _, v, pool = op.operands[:4]
    tables, indices = op.operands[8:]
    keys = min(tables.shape[1] * pool.shape[1], indices.shape[2])
    return 2 * (q.shape[3] + v.shape[3]) * (q.numel // q.shape[3]) * keys


PAGED = letters(
    f"BT(kg)D,BTkD,BTkD,NSkD,NSkD,{ROWS}->BT(kg)D,B(kg)T", flops=attention_flops, work="attention", saved=True,
    carries=2, cached=(3, 4), calls=CALLS,
)  # fmt: skip
OPS: Table = {
    "tpshard.paged_attention": PAGED,
    "tpshard.paged_attention_lse": PAGED,
    # every device selects the same keys, so that all dims are whole
    "tpshard.paged_select_keys": letters(
        f"BTHD,BTOD,BTH,NSOD,{ROWS}->BTC", flops=select_flops, work="matmul", saved=True, cached=(3,), calls=17
    ),
    "tpshard.paged_selected_attention": letters(
        f"BT(kg)D,BTkD,BTkE,NSkD,NSkE,{ROWS},BTC->BT(kg)E,B(kg)T", flops=selected_flops, work="attention", saved=True,
        carries=2, cached=(3, 4), listed=9, calls=30,
    ),
}  # fmt: skip
