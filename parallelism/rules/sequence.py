"""Alternative rules of attention over a sharded sequence, besides moving the axes to heads by two all-to-alls.

Every device keeps its queries. Either it gathers all keys and values, or these rotate in a ring while the device
computes with those it has (Liu et al. 2023): the same bytes, overlapped with computation, and never all in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.rules.rule import Dim, Exchange, Factors, Kind, LocalOp, Rule

aten = torch.ops.aten


class _Factors:
    """The factors of attention: `q[b s (kv g) d]`, `k[b t kv d]`, `lse[b (kv g) s]`.

    They are batch, queries, KV heads, query heads per KV head, and head dim.
    """

    def __init__(self, q: Value, k: Value):
        self.all = Factors()
        self.b, self.s = self.all.new(q.shape[0]), self.all.new(q.shape[1])
        self.kv, self.g = self.all.new(k.shape[2]), self.all.new(q.shape[2] // k.shape[2])
        self.d = self.all.new(q.shape[3], Kind.WHOLE)
        self.work = (self.b, self.s, self.kv, self.g)

    def queries(self) -> tuple[Dim, ...]:
        return (self.b,), (self.s,), (self.kv, self.g), (self.d,)

    def keys(self, t: int) -> tuple[Dim, ...]:
        return (self.b,), (t,), (self.kv,), (self.d,)

    def lse(self) -> tuple[Dim, ...]:
        return (self.b,), (self.kv, self.g), (self.s,)

    def documents(self, t: int) -> tuple[Dim, ...]:
        return (self.b,), (t,)


def forward(op: Op, flops: int) -> tuple[Rule, ...]:
    """The rules of attention over a sharded sequence, by gathered keys and by a ring.

    The op is attention(q, k, v, documents, scale, window, softcap) -> out, lse.
    """
    return _forward(op, flops, ring=False), _forward(op, flops, ring=True)


def backward(op: Op, flops: int) -> tuple[Rule, ...]:
    """The rules of attention's gradient over a sharded sequence, by gathered keys and by a ring.

    The op is attention_backward(dout, q, k, v, out, lse, documents, scale, window, softcap) -> dq, dk, dv.
    """
    return _backward(op, flops, ring=False), _backward(op, flops, ring=True)


def _forward(op: Op, flops: int, ring: bool) -> Rule:
    q, k = op.operands[:2]
    dims = _Factors(q, k)
    t = dims.s if ring else dims.all.new(k.shape[1], Kind.WHOLE)
    scale, window, softcap = _settings(op, 4)

    def local(at: LocalOp) -> Any:
        if not at.axes(dims.s):
            return at.same()
        keys, values, *rest = at.inputs[1:]
        first, members = at.offset(dims.s), at.members(dims.s)
        own = _own_documents(at, dims.s, rest, ring)
        like = [(at.shape(i), at.dtype(i)) for i in (0, 1)]

        def part(behind: int, moving: list[Any]) -> list[Any]:
            first_key = at.pick(dims.s, [((p - behind) % members) * at.size(dims.s) for p in range(members)])
            theirs = moving[2] if rest else None
            return at.several(
                torch.ops.tpshard.attention_part.default, at.inputs[0], *moving[:2], own, theirs, scale, window, first,
                first_key if ring else 0, softcap, like=like, work=1 / members if ring else 1.0,
            )  # fmt: skip

        if not ring:
            return part(0, [keys, values, *rest])
        moving = [keys, values, *rest]
        out, lse = part(0, moving)
        for behind in range(1, members):
            moving = [at.shift(node, dims.s) for node in moving]
            out, lse = _merge_partial(at, out, lse, *part(behind, moving))
        return [out, lse]

    operands = [dims.queries(), dims.keys(t), dims.keys(t), *[dims.documents(t)] * (len(op.operands) - 3)]
    return dims.all.rule(
        operands, [dims.queries(), dims.lse()], flops=flops, work=dims.work, local=local, even=True,
        exchanged=_rotation(op.operands[1:], dims.s) if ring else (),
    )  # fmt: skip


def _backward(op: Op, flops: int, ring: bool) -> Rule:
    _, q, k = op.operands[:3]
    dims = _Factors(q, k)
    t = dims.s if ring else dims.all.new(k.shape[1], Kind.WHOLE)
    dims.all.kinds[dims.g] = Kind.REDUCE
    if not ring:
        dims.all.kinds[dims.s] = Kind.REDUCE  # every device has its queries' share of all keys' gradients
    scale, window, softcap = _settings(op, 7)

    def local(at: LocalOp) -> Any:
        if not at.axes(dims.s):
            return at.same()
        grad, q, keys, values, out, lse, *rest = at.inputs
        first, members = at.offset(dims.s), at.members(dims.s)
        own = _own_documents(at, dims.s, rest, ring)
        wide = torch.promote_types(at.dtype(1), torch.float32)
        like = [(at.shape(0), at.dtype(0)), (at.shape(1), wide), (at.shape(2), wide)]

        def part(behind: int, moving: list[Any]) -> list[Any]:
            first_key = at.pick(dims.s, [((p - behind) % members) * at.size(dims.s) for p in range(members)])
            theirs = moving[2] if rest else None
            return at.several(
                torch.ops.tpshard.attention_part_backward.default, grad, q, *moving[:2], out, lse, own, theirs, scale,
                window, first, first_key if ring else 0, softcap, like=like, work=1 / members if ring else 1.0,
            )  # fmt: skip

        moving = [keys, values, *rest]
        dq, dk, dv = part(0, moving)
        for behind in range(1, members if ring else 1):
            moving = [at.shift(node, dims.s) for node in moving]
            dk, dv = (at.shift(node, dims.s) for node in (dk, dv))
            parts = part(behind, moving)
            dq, dk, dv = (
                at.emit(aten.add.Tensor, mine, theirs, shape=at.shape_of(mine), dtype=at.dtype_of(mine))
                for mine, theirs in zip((dq, dk, dv), parts)
            )
        if ring:  # from the last device that added to them back to their own
            dk, dv = (at.shift(node, dims.s) for node in (dk, dv))
        return [dq, *(_cast(at, node, at.shape(i), at.dtype(i)) for i, node in ((1, dk), (2, dv)))]

    queries, keys = dims.queries(), dims.keys(t)
    operands = [queries, queries, keys, keys, queries, dims.lse(), *[dims.documents(t)] * (len(op.operands) - 6)]
    sent = [*op.operands[2:4], *op.operands[2:4], *op.operands[6:]]
    return dims.all.rule(
        operands, [queries, keys, keys], flops=flops, work=dims.work, local=local, even=True,
        exchanged=_rotation(sent, dims.s) if ring else (),
    )  # fmt: skip


def _settings(op: Op, first: int) -> tuple[float, int | None, float | None]:
    """The arguments scale, window and softcap of an op; scale is argument `first`."""
    scale, window, softcap = (*op.args[first:], None, None)[:3]
    return scale, window, softcap


def _rotation(values: list[Value], factor: int) -> tuple[Exchange, ...]:
    """The exchange of a ring: every device sends its shard of these values to the next one, until all have all."""
    return (Exchange(factor, sum(value.bytes for value in values), len(values), rotating=True),)


def _own_documents(at: LocalOp, factor: int, rest: list[Any], ring: bool) -> Any:
    """The document ids of this device's queries; None if there are none."""
    if not rest:
        return None
    (documents,) = rest
    if ring:
        return documents
    shape = (at.shape_of(documents)[0], at.size(factor))
    dtype = at.dtype_of(documents)
    return at.emit(aten.narrow.default, documents, 1, at.offset(factor), at.size(factor), shape=shape, dtype=dtype)


def _merge_partial(at: LocalOp, out: Any, lse: Any, more: Any, more_lse: Any) -> tuple[Any, Any]:
    """Merges the outputs and logsumexps of attention to two parts of the keys."""
    (b, h, s), dtype, wide = at.shape_of(lse), at.dtype_of(out), at.dtype_of(lse)
    total = at.emit(aten.logaddexp.default, lse, more_lse, shape=(b, h, s), dtype=wide)

    def weigh(share: Any, logs: Any) -> Any:
        weight = at.emit(aten.sub.Tensor, logs, total, shape=(b, h, s), dtype=wide)
        weight = at.emit(aten.exp.default, weight, shape=(b, h, s), dtype=wide)
        weight = at.emit(aten.permute.default, weight, [0, 2, 1], shape=(b, s, h), dtype=wide)
        weight = at.emit(aten.unsqueeze.default, weight, 3, shape=(b, s, h, 1), dtype=wide)
        return at.emit(aten.mul.Tensor, share, weight, shape=at.shape_of(out), dtype=wide)

    combined = at.emit(aten.add.Tensor, weigh(out, lse), weigh(more, more_lse), shape=at.shape_of(out), dtype=wide)
    return _cast(at, combined, at.shape_of(out), dtype), total


def _cast(at: LocalOp, node: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    if at.dtype_of(node) == dtype:
        return node
    return at.emit(aten._to_copy.default, node, shape=shape, dtype=dtype)
