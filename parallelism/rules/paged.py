"""The rule of attention over a paged cache: heads may be sharded, rows and blocks not."""

from __future__ import annotations

from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.rule import Factors, Kind, Rule

CALLS = 14
"""Library operations that a CPU runs for one call in which all rows read equally many blocks."""


def paged_attention(op: Op) -> Rule:
    """The rule of attention over a paged cache: only heads may be sharded.

    `q[b t (kv g) d], k, v[b t kv d], pools[n s kv d], positions, slots, sequences[b t], tables[m w] -> q`. Rows write
    to the pools, so that every device with a KV head needs all rows. More devices than KV heads shard g and replicate
    the KV heads with their pools. A second result is `lse[b (kv g) t]`. FLOPs are those of the present blocks, or of
    one if their number is free.
    """
    q, k, _, pool = op.operands[:4]
    factors = Factors()

    def whole(size: int) -> int:
        return factors.new(size, Kind.WHOLE)

    b, t, d = whole(q.shape[0]), whole(q.shape[1]), whole(q.shape[3])
    n, s = whole(pool.shape[0]), whole(pool.shape[1])
    m, w = (whole(size) for size in op.operands[8].shape)
    kv = factors.new(k.shape[2])
    g = factors.new(q.shape[2] // k.shape[2])
    queries, keys, pools = ((b,), (t,), (kv, g), (d,)), ((b,), (t,), (kv,), (d,)), ((n,), (s,), (kv,), (d,))
    row = ((b,), (t,))
    cached = op.operands[8].shape[1] * pool.shape[1]
    window = op.args[10] if len(op.args) > 10 and op.args[10] is not None else cached
    flops = 4 * q.numel * min(cached, window)
    return factors.rule(
        [queries, keys, keys, pools, pools, row, row, row, ((m,), (w,))],
        [queries, ((b,), (kv, g), (t,))][: len(op.results)],
        flops=flops, work=(kv, g),
    )  # fmt: skip


PAGED = Entry(paged_attention, work="attention", saved=True, carries=2, cached=(3, 4), calls=CALLS)
OPS: Table = {"tpshard.paged_attention": PAGED, "tpshard.paged_attention_lse": PAGED}
