"""The rules of operations on a paged cache: heads of attention may be sharded, rows and blocks not."""

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


def paged_select_keys(op: Op) -> Rule:
    """The rule of an indexer over a paged cache: every device selects the same keys, so all dims are whole.

    `q[b t h d], k[b t o d], weights[b t h], pool[n s o d], positions, slots, sequences[b t], tables[m w] -> [b t c]`.
    FLOPs are those of the present blocks, or of one if their number is free.
    """
    factors = Factors()
    operands, results = ([factors.dims(x.shape, Kind.WHOLE) for x in some] for some in (op.operands, op.results))
    q, _, weights, pool = op.operands[:4]
    cached = op.operands[7].shape[1] * pool.shape[1]
    flops = 2 * (q.numel + weights.numel) * cached
    return factors.rule(operands, results, flops=flops)


def paged_selected_attention(op: Op) -> Rule:
    """The rule of attention over a paged cache to selected keys: only heads may be sharded, as in `paged_attention`.

    `q[b t (kv g) d], k[b t kv d], v[b t kv e], k_pool[n s kv d], v_pool[n s kv e], positions, slots, sequences[b t],
    tables[m w], indices[b t c] -> out[b t (kv g) e], lse[b (kv g) t]`.
    """
    q, k, v, pool = op.operands[:4]
    factors = Factors()

    def whole(size: int) -> int:
        return factors.new(size, Kind.WHOLE)

    b, t, d, e = (whole(size) for size in (*q.shape[:2], q.shape[3], v.shape[3]))
    n, s, c = whole(pool.shape[0]), whole(pool.shape[1]), whole(op.operands[9].shape[2])
    m, w = (whole(size) for size in op.operands[8].shape)
    kv = factors.new(k.shape[2])
    g = factors.new(q.shape[2] // k.shape[2])
    row, heads = ((b,), (t,)), (kv, g)
    keys = min(op.operands[8].shape[1] * pool.shape[1], op.operands[9].shape[2])
    return factors.rule(
        [(*row, heads, (d,)), (*row, (kv,), (d,)), (*row, (kv,), (e,)), ((n,), (s,), (kv,), (d,)),
         ((n,), (s,), (kv,), (e,)), row, row, row, ((m,), (w,)), (*row, (c,))],
        [(*row, heads, (e,)), ((b,), heads, (t,))],
        flops=2 * (q.shape[3] + v.shape[3]) * (q.numel // q.shape[3]) * keys, work=(kv, g),
    )  # fmt: skip


PAGED = Entry(paged_attention, work="attention", saved=True, carries=2, cached=(3, 4), calls=CALLS)
SELECT = Entry(paged_select_keys, work="matmul", saved=True, cached=(3,), calls=17)
SELECTED = Entry(paged_selected_attention, work="attention", saved=True, carries=2, cached=(3, 4), listed=9, calls=30)
OPS: Table = {
    "tpshard.paged_attention": PAGED, "tpshard.paged_attention_lse": PAGED,
    "tpshard.paged_select_keys": SELECT, "tpshard.paged_selected_attention": SELECTED,
}  # fmt: skip
