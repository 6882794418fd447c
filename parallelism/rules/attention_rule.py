"""Rules of attention as one op, forward and backward, with grouped queries: tpshard's causal op, and torch's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.rules import rotation, sequence
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.letters import tensors
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule

aten = torch.ops.aten


def attention(op: Op) -> Rule:
    """The rule of tpshard's causal attention: batch and heads may be sharded, the sequence by alternative rules.

    `q[b s (kv g) d], k[b t kv d], v[b t kv d], documents[b s] -> out[b s (kv g) d], lse[b (kv g) s]`. Query heads are
    kv x g, so that more devices than KV heads shard g and replicate the KV heads.
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
    return replace(main, others=sequence.forward(op, flops, _call(op, 4))) if t == s and dv == d else main


def attention_backward(op: Op) -> Rule:
    """The rule of tpshard's attention gradient: dk and dv are summed over the queries of a group.

    `dout, q, k, v, out, lse, documents -> dq, dk, dv`, in the dims of `attention`.
    """
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
    return replace(main, others=sequence.backward(op, flops, _call(op, 7))) if k.shape[1] == q.shape[1] else main


def _call(op: Op, first: int) -> sequence.Call:
    """The op's arguments scale, window and softcap, of which `first` is the first."""
    return sequence.Call(*(*op.args[first:], None, None)[:3])


def _products(op: Op, q: Value, k: Value, window: int) -> int:
    """The number of query-key products of causal attention: half of all, or those within a window.

    window: the index of the op's argument `window`.
    """
    keys = k.shape[1]
    in_window = op.args[window] if len(op.args) > window and op.args[window] is not None else keys
    if in_window >= keys:
        return q.numel * keys // 2
    return q.numel * (in_window * keys - in_window * (in_window - 1) // 2) // keys


FORWARD = "q k v m -> q l"
BACKWARD = "q q k v q l m -> q k v"


def of_torch(op: Op, text: str = FORWARD) -> Rule:
    """The rules of torch's own attention: batch, heads and queries may be sharded, keys as well in a ring.

    `q[b (kv g) s d], k[b kv t d], v[b kv t d]`, and a mask that broadcasts to `[b (kv g) s t]`. The gradients of keys
    and values are summed over the queries of a group. Causal queries are cut with a mask. text: the tensors of the op,
    by letter.
    """
    index_of = dict(zip(text.split(), tensors(op)))
    q, k, mask = (None if (i := index_of[name]) is None else op.operands[i] for name in "qkm")
    assert q is not None and k is not None
    causal, scale = op.kwargs.get("is_causal", any(a is True for a in op.args)), op.kwargs.get("scale")
    main = _dense(op, text, causal, ring=False)
    if not causal:
        ring = q.shape[2] == k.shape[2] > 1 and (mask is None or mask.shape[-1] == k.shape[2])
        return replace(main, others=(_dense(op, text, causal, ring=True),)) if ring else main
    if mask is not None:  # torch allows no mask beside is_causal
        return main
    call = sequence.Call(1 / math.sqrt(q.shape[3]) if scale is None else scale, heads_first=True)
    ways = sequence.backward if text == BACKWARD else sequence.forward
    return replace(main, others=ways(op, main.flops, call))


def _dense(op: Op, text: str, causal: bool, ring: bool) -> Rule:
    """The rule of torch's attention with keys that are whole on every device, or rotate in a ring."""
    operands, results = (side.split() for side in text.split(" -> "))
    named = [name for name, i in zip(operands, tensors(op)) if i is not None]
    q, k = (op.operands[named.index(name)] for name in "qk")
    factors = Factors()
    shared = Kind.REDUCE if text == BACKWARD else Kind.PASS
    b, kv = factors.new(q.shape[0]), factors.new(k.shape[1])
    g = factors.new(q.shape[1] // k.shape[1], shared)
    s = factors.new(q.shape[2], Kind.WHOLE if causal else Kind.PASS if ring else shared)
    columns, d = factors.new(k.shape[2], Kind.WHOLE), factors.new(q.shape[3], Kind.WHOLE)
    keys: tuple[Dim, ...] = ((b,), (kv,), (s if ring else columns,), (d,))
    scores: tuple[Dim, ...] = ((b,), (kv, g), (s,), (columns,))
    dims = {"q": ((b,), (kv, g), (s,), (d,)), "k": keys, "v": keys, "l": scores[:3], "m": scores}

    def of(name: str, value: Value) -> tuple[Dim, ...]:
        full = dims[name][len(dims[name]) - value.rank :]
        return tuple(() if n == 1 else dim for n, dim in zip(value.shape, full))

    def local(at: LocalOp) -> Any:
        rotate = rotation.backward if text == BACKWARD else rotation.forward
        return rotate(at, s, k.shape[2], op.kwargs.get("scale")) if at.axes(s) else at.same()

    flops = (10 if text == BACKWARD else 4) * q.numel * k.shape[2]
    facts: dict[str, Any] = {}
    if ring:
        sent = [value for name, value in zip(named, op.operands) if name in "kv"] * (2 if text == BACKWARD else 1)
        fills = (*sequence.PADDED_GRADIENTS, (6, 0.0)) if text == BACKWARD else sequence.PADDED_KEYS
        facts = {"local": local, **sequence.of_ring(s, sent, fills)}
    return factors.rule(
        [of(name, value) for name, value in zip(named, op.operands)],
        [of(name, value) for name, value in zip(results, op.results)],
        flops=flops // (2 if causal else 1), work=(b, kv, g, s), **facts,
    )  # fmt: skip


OPS: Table = {
    "tpshard.attention": Entry(attention, work="attention", saved=True, carries=2, calls=10),
    "tpshard.attention_backward": Entry(attention_backward, work="attention_backward", calls=9),
    "tpshard.attention_part": Entry(work="attention", saved=True),
    "tpshard.attention_part_backward": Entry(work="attention_backward"),
    aten._scaled_dot_product_flash_attention_for_cpu: Entry(of_torch, work="attention", saved=True, dense="last"),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: Entry(
        lambda op: of_torch(op, BACKWARD), work="attention_backward", saved=True, dense="last"
    ),
}
