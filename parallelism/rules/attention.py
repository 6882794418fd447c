"""Causal attention as one op, forward and backward, with grouped queries."""

from __future__ import annotations

from dataclasses import replace

import torch
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.rules import sequence
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.rule import Factors, Kind, Rule

aten = torch.ops.aten


def attention(op: Op) -> Rule:
    """`q[b s (kv g) d], k[b t kv d], v[b t kv d], documents[b s] -> out[b s (kv g) d], lse[b (kv g) s]`.

    Query heads are kv x g, so that more devices than KV heads shard g and replicate the KV heads.
    """
    q, k = op.operands[:2]
    factors = Factors()
    b = factors.new(q.shape[0])
    s = factors.new(q.shape[1], Kind.WHOLE)
    t = s if k.shape[1] == q.shape[1] else factors.new(k.shape[1], Kind.WHOLE)
    kv = factors.new(k.shape[2])
    g = factors.new(q.shape[2] // k.shape[2])
    d = factors.new(q.shape[3], Kind.WHOLE)
    dv = d if op.operands[2].shape[3] == q.shape[3] else factors.new(op.operands[2].shape[3], Kind.WHOLE)
    queries = ((b,), (s,), (kv, g), (d,))
    keys, values = ((b,), (t,), (kv,), (d,)), ((b,), (t,), (kv,), (dv,))
    documents = [((b,), (s,))] * (len(op.operands) - 3)
    flops = 4 * _products(op, q, k, 5)
    main = factors.rule(
        [queries, keys, values, *documents], [((b,), (s,), (kv, g), (dv,)), ((b,), (kv, g), (s,))],
        flops=flops, work=(b, kv, g),
    )  # fmt: skip
    return replace(main, others=sequence.forward(op, flops)) if t == s and dv == d else main


def attention_backward(op: Op) -> Rule:
    """`dout, q, k, v, out, lse, documents -> dq, dk, dv`: dk and dv are summed over the queries of a group."""
    _, q, k = op.operands[:3]
    factors = Factors()
    b = factors.new(q.shape[0])
    s = factors.new(q.shape[1], Kind.WHOLE)
    kv = factors.new(k.shape[2])
    g = factors.new(q.shape[2] // k.shape[2], Kind.REDUCE)
    d = factors.new(q.shape[3], Kind.WHOLE)
    queries = ((b,), (s,), (kv, g), (d,))
    keys = ((b,), (s,), (kv,), (d,))
    lse = ((b,), (kv, g), (s,))
    documents = [((b,), (s,))] * (len(op.operands) - 6)
    flops = 10 * _products(op, q, k, 8)
    main = factors.rule(
        [queries, queries, keys, keys, queries, lse, *documents], [queries, keys, keys],
        flops=flops, work=(b, kv, g),
    )  # fmt: skip
    return replace(main, others=sequence.backward(op, flops)) if k.shape[1] == q.shape[1] else main


def _products(op: Op, q: Value, k: Value, window: int) -> int:
    """Multiplications of queries and keys that count: half of all, as rows see none after them, or those of a window,
    which is argument `window`."""
    keys = k.shape[1]
    seen = op.args[window] if len(op.args) > window and op.args[window] is not None else keys
    if seen >= keys:
        return q.numel * keys // 2
    return q.numel * (seen * keys - seen * (seen - 1) // 2) // keys


def batch_and_heads(op: Op, products: int = 0) -> Rule:
    """Ops that treat every slice of the first two dims alike (torch's own attention, pooling): the rest is whole.

    `products`: FLOPs for each element of the queries and each key.
    """
    lead = op.operands[0].shape[:2]
    factors = Factors()
    first = [(factors.new(n),) if n != 1 else () for n in lead]

    def of(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        shared = len(shape) > 2 and shape[:2] == lead
        whole = [(factors.new(n, Kind.WHOLE),) if n != 1 else () for n in shape]
        return (*first, *whole[2:]) if shared else tuple(whole)

    flops = products * op.operands[0].numel * op.operands[1].shape[2] if products else 0
    return factors.rule(
        [of(v.shape) for v in op.operands], [of(v.shape) for v in op.results], flops=flops,
        work=tuple(f for dim in first for f in dim),
    )  # fmt: skip


forward = Entry(lambda op: batch_and_heads(op, 4), work="attention", saved=True)
backward = Entry(lambda op: batch_and_heads(op, 10), work="attention_backward", saved=True)
OPS: Table = {
    "tpshard.attention": Entry(attention, work="attention", saved=True, carries=2),
    "tpshard.attention_backward": Entry(attention_backward, work="attention_backward"),
    "tpshard.attention_part": Entry(work="attention", saved=True),
    "tpshard.attention_part_backward": Entry(work="attention_backward"),
    aten._scaled_dot_product_flash_attention: forward,
    aten._scaled_dot_product_flash_attention_backward: backward,
    aten._scaled_dot_product_flash_attention_for_cpu: forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    aten._scaled_dot_product_efficient_attention: forward,
    aten._scaled_dot_product_efficient_attention_backward: backward,
    aten.max_pool2d_with_indices: Entry(batch_and_heads),
    aten.avg_pool2d: Entry(batch_and_heads),
}
