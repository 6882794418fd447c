"""Rules of attention as one op, forward and backward, with grouped queries: tpshard's causal op, and torch's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.rules import rotation, sequence
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.letters import Spelled, rule_of
from tpshard.parallelism.rules.rule import LocalOp, Rule
from tpshard.parallelism.rules.sequence_rows import Call

aten = torch.ops.aten


def attention(op: Op) -> Rule:
    """The rule of tpshard's causal attention: batch and heads may be sharded, the sequence by alternative rules.

    Query heads are KV heads k times groups g, so that more devices than KV heads shard g and replicate the KV heads.
    """
    q, k, v = op.operands[:3]
    keys = "S" if k.shape[1] == q.shape[1] else "T"
    width = "D" if v.shape[3] == q.shape[3] else "E"
    flops = 4 * _products(op, q, k, 5)
    main = rule_of(op, f"bS(kg)D,b{keys}kD,b{keys}k{width},bS->bS(kg){width},b(kg)S", flops=flops)
    return replace(main, others=sequence.forward(op, flops, _call(op, 4))) if (keys, width) == ("S", "D") else main


def attention_backward(op: Op) -> Rule:
    """The rule of tpshard's attention gradient, `dout, q, k, v, out, lse, documents -> dq, dk, dv`.

    dk and dv are summed over the queries of a group.
    """
    _, q, k = op.operands[:3]
    flops = 10 * _products(op, q, k, 8)
    main = rule_of(op, "bS(kg)D,bS(kg)D,bSkD,bSkD,bS(kg)D,b(kg)S,bS->bS(kg)D,bSkD,bSkD", flops=flops)
    return replace(main, others=sequence.backward(op, flops, _call(op, 7))) if k.shape[1] == q.shape[1] else main


def _call(op: Op, first: int) -> Call:
    """The op's arguments scale, window and softcap, of which `first` is the first."""
    return Call(*(*op.args[first:], None, None)[:3])


def _products(op: Op, q: Value, k: Value, window: int) -> int:
    """The number of query-key products of causal attention: half of all, or those within a window.

    window: the index of the op's argument `window`.
    """
    keys = k.shape[1]
    in_window = op.args[window] if len(op.args) > window and op.args[window] is not None else keys
    if in_window >= keys:
        return q.numel * keys // 2
    return q.numel * (in_window * keys - in_window * (in_window - 1) // 2) // keys


def of_torch(op: Op, forward: bool = True) -> Rule:
    """The rules of torch's own attention: batch, heads and queries may be sharded, keys as well in a ring.

    The operands are q, k, v and maybe a mask, or dout, q, k, v, out, lse and maybe a mask. The gradients of keys and
    values are summed over the queries of a group. Causal queries are cut with a mask.
    """
    first = 0 if forward else 1
    q, k = op.operands[first : first + 2]
    mask = op.operands[-1] if len(op.operands) > (3 if forward else 6) else None
    causal, scale = op.kwargs.get("is_causal", any(a is True for a in op.args)), op.kwargs.get("scale")
    flops = (4 if forward else 10) * q.numel * k.shape[2] // (2 if causal else 1)
    main = rule_of(op, _letters(forward, "S" if causal else "s", "T"), flops=flops)
    if not causal:
        ring = q.shape[2] == k.shape[2] > 1 and (mask is None or mask.shape[-1] == k.shape[2])
        return replace(main, others=(_ring(op, forward, flops),)) if ring else main
    if mask is not None:  # torch allows no mask beside is_causal
        return main
    call = Call(1 / math.sqrt(q.shape[3]) if scale is None else scale, heads_first=True)
    ways = sequence.forward if forward else sequence.backward
    return replace(main, others=ways(op, flops, call))


def _letters(forward: bool, s: str, t: str) -> str:
    """The dims of torch's attention, with the letters `s` of queries and `t` of keys."""
    q, k, lse, mask = f"b(kg){s}D", f"bk{t}D", f"b(kg){s}", f"b(kg){s}T"
    return f"{q},{k},{k},{mask}->{q},{lse}" if forward else f"{q},{q},{k},{k},{q},{lse},{mask}->{q},{k},{k}"


def _ring(op: Op, forward: bool, flops: int) -> Rule:
    """The rule of torch's attention with keys that rotate in a ring."""
    spelled = Spelled(op, _letters(forward, "s", "s"))
    s, t = spelled.of["s"], spelled.sizes["s"]

    def local(at: LocalOp, of: Mapping[str, int]) -> Any:
        rotate = rotation.forward if forward else rotation.backward
        return rotate(at, s, t, op.kwargs.get("scale")) if at.axes(s) else at.same()

    if forward:
        return spelled.rule(flops=flops, local=local, **sequence.of_ring(s, op.operands[1:3], sequence.PADDED_KEYS))
    sent, fills = op.operands[2:4] * 2, (*sequence.PADDED_GRADIENTS, (6, 0.0))
    return spelled.rule(flops=flops, local=local, **sequence.of_ring(s, sent, fills))


PROCESSORS = 132
"""Streaming multiprocessors of an H100 or H200, over which deterministic FlashAttention divides a gradient's sums."""


def flash_scratch(shapes: Sequence[Sequence[int]]) -> int:
    """Bytes that FlashAttention's deterministic backward pass takes: sums of q's gradient in fp32, one for each part of
    the keys that a head is divided into to keep all processors busy; and k's and v's gradients of every query head.

    torch's `flash_attn/flash_api.cpp`, mha_bwd. shapes: dout [b,s,h,d], q, k [b,t,kv,d], ...
    """
    (b, s, h, d), t, kv = shapes[0], shapes[2][1], shapes[2][2]
    parts, rows, width = -(-PROCESSORS // (b * h)), -(-s // 128) * 128, -(-d // 32) * 32
    return 4 * parts * b * rows * h * width + (4 * b * t * h * d if kv != h else 0)


def _scratch_of_torch(shapes: Sequence[Sequence[int]]) -> int:
    """`flash_scratch` of torch's order of dims: dout [b,h,s,d], q, k [b,kv,t,d], ..."""
    return flash_scratch([(b, s, h, d) for b, h, s, d in shapes[:3]])


OPS: Table = {
    "tpshard.attention": Entry(attention, work="attention", saved=True, carries=2, calls=10),
    "tpshard.attention_backward": Entry(
        attention_backward, work="attention_backward", saved=True, calls=9, scratch=flash_scratch
    ),
    "tpshard.attention_part": Entry(work="attention", saved=True, calls=10),
    "tpshard.attention_part_backward": Entry(work="attention_backward", calls=9, scratch=flash_scratch),
    aten._scaled_dot_product_flash_attention_for_cpu: Entry(
        of_torch, work="attention", saved=True, dense="last", carries=2, heads_dim=1
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: Entry(
        partial(of_torch, forward=False),
        work="attention_backward",
        saved=True,
        dense="last",
        scratch=_scratch_of_torch,
    ),
}
