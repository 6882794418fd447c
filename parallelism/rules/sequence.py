"""The rules of causal attention whose sequence is sharded.

The alternative is to reshard from sequence to heads and back. Here every device keeps its queries. Either it gathers
all keys and values, or these rotate in a ring while the device computes with those it has (Liu et al. 2023). A ring
sends the same bytes, overlaps them with computation, and never holds all keys. Both work for tpshard's attention and
for torch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tpshard.kernels.attention import ATTENTION_PART, ATTENTION_PART_BACKWARD
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.rules.rotation import cast, merge
from tpshard.parallelism.rules.rule import Dim, Exchange, Factors, Kind, LocalOp, Rule

aten = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """The settings and the order of dims with which an op calls causal attention."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    heads_first: bool = False
    """Whether heads come before the sequence, as in torch's attention: `q[b h s d]`, not `q[b s h d]`."""

    def order(self, b: Any, s: Any, heads: Any, d: Any) -> tuple[Any, ...]:
        """Four dims in the op's order."""
        return (b, heads, s, d) if self.heads_first else (b, s, heads, d)

    def turn(self, at: LocalOp, node: Any) -> Any:
        """Permutes a node from the op's order of dims to tpshard's, or back."""
        if not self.heads_first:
            return node
        a, b, c, d = at.shape_of(node)
        return at.emit(aten.transpose.int, node, 1, 2, shape=(a, c, b, d), dtype=at.dtype_of(node))


class _Factors:
    """The factors of attention: `q[b s (kv g) d]`, `k[b t kv d]`, `lse[b (kv g) s]`.

    They are batch, queries, KV heads, query heads per KV head, and head dim.
    """

    def __init__(self, q: Value, k: Value, call: Call):
        (b, s, heads, d), kv_heads = call.order(*q.shape), call.order(*k.shape)[2]
        self.call, self.all = call, Factors()
        self.b, self.s = self.all.new(b), self.all.new(s)
        self.kv, self.g = self.all.new(kv_heads), self.all.new(heads // kv_heads)
        self.d = self.all.new(d, Kind.WHOLE)
        self.work = (self.b, self.s, self.kv, self.g)

    def queries(self) -> tuple[Dim, ...]:
        return self.call.order((self.b,), (self.s,), (self.kv, self.g), (self.d,))

    def keys(self, t: int) -> tuple[Dim, ...]:
        return self.call.order((self.b,), (t,), (self.kv,), (self.d,))

    def lse(self) -> tuple[Dim, ...]:
        return (self.b,), (self.kv, self.g), (self.s,)

    def documents(self, t: int) -> tuple[Dim, ...]:
        return (self.b,), (t,)


def forward(op: Op, flops: int, call: Call) -> tuple[Rule, ...]:
    """The rules of attention over a sharded sequence, by gathered keys and by a ring.

    The operands are q, k, v and maybe documents, the results out and lse. A ring needs as many keys as queries.
    """
    q, k = op.operands[:2]
    same_length = call.order(*q.shape)[1] == call.order(*k.shape)[1]
    return tuple(_forward(op, flops, call, ring) for ring in ((False, True) if same_length else (False,)))


def backward(op: Op, flops: int, call: Call) -> tuple[Rule, ...]:
    """The rules of attention's gradient over a sharded sequence, by gathered keys and by a ring.

    The operands are dout, q, k, v, out, lse and maybe documents, the results dq, dk and dv.
    """
    q, k = op.operands[1:3]
    same_length = call.order(*q.shape)[1] == call.order(*k.shape)[1]
    return tuple(_backward(op, flops, call, ring) for ring in ((False, True) if same_length else (False,)))


def _forward(op: Op, flops: int, call: Call, ring: bool) -> Rule:
    q, k = op.operands[:2]
    dims = _Factors(q, k, call)
    t = dims.s if ring else dims.all.new(call.order(*k.shape)[1], Kind.WHOLE)

    def local(at: LocalOp) -> Any:
        if not at.axes(dims.s):
            return at.same()
        queries, keys, values = (call.turn(at, node) for node in at.inputs[:3])
        rest = at.inputs[3:]
        first, members = at.offset(dims.s), at.members(dims.s)
        own = _own_documents(at, dims.s, rest, ring)
        like = [(at.shape_of(queries), at.dtype(0)), (at.shape(1), at.dtype(1))]

        def part(behind: int, moving: list[Any]) -> list[Any]:
            first_key = at.pick(dims.s, [((p - behind) % members) * at.size(dims.s) for p in range(members)])
            key_documents = moving[2] if rest else None
            return at.several(
                ATTENTION_PART, queries, *moving[:2], own, key_documents, call.scale, call.window, first,
                first_key if ring else 0, call.softcap, like=like, work=1 / members if ring else 1.0,
            )  # fmt: skip

        moving = [keys, values, *rest]
        out, lse = part(0, moving)
        for behind in range(1, members if ring else 1):
            moving = [at.shift(node, dims.s) for node in moving]
            out, lse = merge(at, (out, lse), part(behind, moving), heads_first=False)
        return [call.turn(at, out), lse]

    operands = [dims.queries(), dims.keys(t), dims.keys(t), *[dims.documents(t)] * (len(op.operands) - 3)]
    return dims.all.rule(
        operands, [dims.queries(), dims.lse()], flops=flops, work=dims.work, local=local,
        **of_ring(dims.s, op.operands[1:], PADDED_KEYS) if ring else {},
    )  # fmt: skip


def _backward(op: Op, flops: int, call: Call, ring: bool) -> Rule:
    q, k = op.operands[1:3]
    dims = _Factors(q, k, call)
    t = dims.s if ring else dims.all.new(call.order(*k.shape)[1], Kind.WHOLE)
    dims.all.kinds[dims.g] = Kind.REDUCE
    if not ring:
        dims.all.kinds[dims.s] = Kind.REDUCE  # every device has its queries' share of all keys' gradients

    def local(at: LocalOp) -> Any:
        if not at.axes(dims.s):
            return at.same()
        grad, q, keys, values, out = (call.turn(at, node) for node in at.inputs[:5])
        lse, *rest = at.inputs[5:]
        first, members = at.offset(dims.s), at.members(dims.s)
        own = _own_documents(at, dims.s, rest, ring)
        wide = torch.promote_types(at.dtype(1), torch.float32)
        like = [(at.shape_of(q), at.dtype(0)), (at.shape_of(keys), wide), (at.shape_of(values), wide)]

        def part(behind: int, moving: list[Any]) -> list[Any]:
            first_key = at.pick(dims.s, [((p - behind) % members) * at.size(dims.s) for p in range(members)])
            added = moving[2] if rest else None
            return at.several(
                ATTENTION_PART_BACKWARD, grad, q, *moving[:2], out, lse, own, added, call.scale, call.window, first,
                first_key if ring else 0, call.softcap, like=like, work=1 / members if ring else 1.0,
            )  # fmt: skip

        moving = [keys, values, *rest]
        dq, dk, dv = part(0, moving)
        for behind in range(1, members if ring else 1):
            moving = [at.shift(node, dims.s) for node in moving]
            dk, dv = (at.shift(node, dims.s) for node in (dk, dv))
            parts = part(behind, moving)
            dq, dk, dv = (
                at.emit(aten.add.Tensor, total, added, shape=at.shape_of(total), dtype=at.dtype_of(total))
                for total, added in zip((dq, dk, dv), parts)
            )
        if ring:  # the last shift brings dk and dv back to the device of their keys
            dk, dv = (at.shift(node, dims.s) for node in (dk, dv))
        return [call.turn(at, cast(at, node, at.dtype(i))) for i, node in enumerate((dq, dk, dv))]

    queries, keys = dims.queries(), dims.keys(t)
    operands = [queries, queries, keys, keys, queries, dims.lse(), *[dims.documents(t)] * (len(op.operands) - 6)]
    sent = [*op.operands[2:4], *op.operands[2:4], *op.operands[6:]]
    return dims.all.rule(
        operands, [queries, keys, keys], flops=flops, work=dims.work, local=local,
        **of_ring(dims.s, sent, PADDED_GRADIENTS) if ring else {},
    )  # fmt: skip


PADDED_KEYS = ((1, 0.0), (2, 0.0))
"""The padding of k and v is set to 0 in a ring. No query sees it, but infinity times a weight of 0 is NaN."""
PADDED_GRADIENTS = tuple((operand, 0.0) for operand in range(6))
"""The padding of dout, q, k, v, out and lse is set to 0 in a ring, so that padded queries add nothing to dk and dv."""


def of_ring(s: int, sent: list[Value], fills: tuple[tuple[int, float], ...]) -> dict[str, Any]:
    """Returns a rule's fields for a ring over factor s, in which shards of the values `sent` reach all devices in turn.

    Shards of equal length follow each other, so that a device knows the positions of the keys that it receives. The
    padding behind the last key is hidden from all queries.
    """
    exchange = Exchange(s, sum(value.bytes for value in sent), len(sent), rotating=True)
    return {"exchanged": (exchange,), "trailing": (s,), "fills": fills}


def _own_documents(at: LocalOp, factor: int, rest: list[Any], ring: bool) -> Any:
    """The document ids of this device's queries; None if there are none."""
    if not rest:
        return None
    (documents,) = rest
    if ring:
        return documents
    (b, t), dtype, size = at.shape_of(documents), at.dtype_of(documents), at.size(factor)
    if size * at.members(factor) > t:  # queries behind the last one have no document
        documents = at.emit(aten.constant_pad_nd.default, documents, [0, size], -1, shape=(b, t + size), dtype=dtype)
    return at.emit(aten.narrow.default, documents, 1, at.offset(factor), size, shape=(b, size), dtype=dtype)
