"""The rules of causal attention whose sequence is sharded.

The alternative is to reshard from sequence to heads and back. Here every device keeps its queries. Either it gathers
all keys and values, or these rotate in a ring while the device computes with those it has (Liu et al. 2023). A ring
sends the same bytes, overlaps them with computation, and never holds all keys. Both work for tpshard's attention and
for torch's.

Under a causal mask the last of n devices looks at (2n - 1) / n times the mean number of keys, and the others wait for
it. Mirrored devices look at equally many: before and after, queries move to where each device has a chunk from the
front of the sequence and its mirror image from the back (Llama 3, arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from tpshard.kernels.attention.attention import ATTENTION_PART, ATTENTION_PART_BACKWARD
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.rules.letters import Spelled
from tpshard.parallelism.rules.rotation import around, cast, merge, plus
from tpshard.parallelism.rules.rule import Exchange, LocalOp, Rule
from tpshard.parallelism.rules.sequence_rows import Call, Rows, rows_of


def forward(op: Op, flops: int, call: Call) -> tuple[Rule, ...]:
    """The rules of attention over a sharded sequence, by gathered keys and by a ring, straight and mirrored.

    The operands are q, k, v and maybe documents, the results out and lse. A ring needs as many keys as queries.
    """
    q, k = op.operands[:2]
    call = call.within(k)
    return tuple(_forward(op, flops, call, *way) for way in _ways(call, q, k))


def backward(op: Op, flops: int, call: Call) -> tuple[Rule, ...]:
    """The rules of attention's gradient over a sharded sequence, by gathered keys and by a ring, straight and mirrored.

    The operands are dout, q, k, v, out, lse and maybe documents, the results dq, dk and dv. With gathered keys every
    device has its queries' share of all keys' gradients.
    """
    q, k = op.operands[1:3]
    call = call.within(k)
    return tuple(_backward(op, flops, call, *way) for way in _ways(call, q, k))


def _ways(call: Call, q: Value, k: Value) -> list[tuple[bool, bool]]:
    """Whether keys rotate, and whether devices are mirrored, which within a window look at equally many keys anyway."""
    if q.shape[call.length] != k.shape[call.length]:
        return [(False, False)]
    return [
        (ring, mirrored) for ring in (False, True) for mirrored in ((False, True) if call.window is None else (False,))
    ]


def _forward(op: Op, flops: int, call: Call, ring: bool, mirrored: bool) -> Rule:
    t = "s" if ring else "T"
    q, k, lse = call.letters(t)
    spelled = Spelled(op, f"{q},{k},{k},b{t}->{q},{lse}")
    s = spelled.of["s"]

    def local(at: LocalOp, of: Mapping[str, int]) -> Any:
        if not at.axes(s):
            return at.same()
        rows = rows_of(at, s, mirrored)
        q, k, v = (call.turn(at, node) for node in at.inputs[:3])
        documents = at.inputs[3:]
        if ring:
            (q, k, v), documents = rows.enter(1, q, k, v), rows.enter(1, *documents)
            part = _ring_part(at, s, call, rows, ATTENTION_PART, (q,), (), documents)
            join = partial(merge, at, heads_first=False)
            out, lse = around(at, s, at.members(s), [k, v, *documents], part, join, staying=2)
        else:
            (q,) = rows.enter(1, q)
            shares = [
                at.several(ATTENTION_PART, piece.of(q, 1), k, v, *piece.settings(call, documents), **piece.work)
                for piece in rows.pieces(call)
            ]
            out, lse = (rows.joined([share[i] for share in shares], dim) for i, dim in ((0, 1), (1, 2)))
        (out,), (lse,) = rows.leave(1, cast(at, out, at.dtype(0))), rows.leave(2, lse)
        return [call.turn(at, out), lse]

    moved = op.operands if ring else op.operands[:1]
    facts = _facts(s, call, mirrored, [*moved, *op.results], 3 + (len(moved) > 3))
    if ring:
        facts = _with_ring(facts, s, op.operands[1:], PADDED_KEYS)
    return spelled.rule(flops=flops, local=local, **facts)


def _backward(op: Op, flops: int, call: Call, ring: bool, mirrored: bool) -> Rule:
    t = "s" if ring else "T"
    q, k, lse = call.letters(t)
    spelled = Spelled(op, f"{q},{q},{k},{k},{q},{lse},b{t}->{q},{k},{k}")
    s = spelled.of["s"]

    def local(at: LocalOp, of: Mapping[str, int]) -> Any:
        if not at.axes(s):
            return at.same()
        rows = rows_of(at, s, mirrored)
        dout, q, k, v, out = (call.turn(at, node) for node in at.inputs[:5])
        (lse,), documents = rows.enter(2, at.inputs[5]), at.inputs[6:]
        wide = torch.promote_types(at.dtype(0), torch.float32)
        if ring:
            (dout, q, out, k, v), documents = rows.enter(1, dout, q, out, k, v), rows.enter(1, *documents)
            one = _ring_part(at, s, call, rows, ATTENTION_PART_BACKWARD, (dout, q), (out, lse), documents)

            def part(behind: int, moving: list[Any]) -> list[Any]:
                return [cast(at, share, wide) for share in one(behind, moving)]

            totals = around(at, s, at.members(s), [k, v, *documents], part, partial(plus, at), staying=1)
            totals = rows.leave(1, *(cast(at, node, at.dtype(i)) for i, node in enumerate(totals)))
        else:
            dout, q, out = rows.enter(1, dout, q, out)
            shares = [
                at.several(
                    ATTENTION_PART_BACKWARD, piece.of(dout, 1), piece.of(q, 1), k, v, piece.of(out, 1),
                    piece.of(lse, 2), *piece.settings(call, documents), **piece.work,
                )
                for piece in rows.pieces(call)
            ]  # fmt: skip
            (dq,) = rows.leave(1, rows.joined([share[0] for share in shares], 1))
            sums = reduce(partial(plus, at), (share[1:] for share in shares))
            totals = [dq, *(cast(at, node, at.dtype(1 + i)) for i, node in enumerate(sums))]
        return [call.turn(at, node) for node in totals]

    moved = [*op.operands, *op.results] if ring else [*op.operands[:2], *op.operands[4:6], op.results[0]]
    facts = _facts(s, call, mirrored, moved, 4 if ring and op.operands[6:] else 3)
    if ring:
        facts = _with_ring(facts, s, [*op.operands[2:4] * 2, *op.operands[6:]], PADDED_GRADIENTS)
    return spelled.rule(flops=flops, local=local, **facts)


def _facts(s: int, call: Call, mirrored: bool, moved: Sequence[Value], swaps: int) -> dict[str, Any]:
    """A rule's fields for devices that are mirrored or not.

    moved: the values that change places if they are. swaps: how many groups of them move together, by two collectives.
    """
    if not mirrored:
        return {"uneven": (s,)} if call.window is None else {}
    return {"exchanged": (Exchange(s, sum(value.bytes for value in moved), 2 * swaps, "swap"),), "trailing": (s,)}


def _with_ring(
    facts: dict[str, Any], s: int, sent: list[Value], fills: tuple[tuple[int, float], ...]
) -> dict[str, Any]:
    """The fields with those of a ring."""
    ring = of_ring(s, sent, fills)
    return {**facts, **ring, "exchanged": (*facts.get("exchanged", ()), *ring["exchanged"])}


def _ring_part(
    at: LocalOp, s: int, call: Call, rows: Rows, target: Any, before: Sequence[Any], after: Sequence[Any],
    documents: Sequence[Any],
) -> Callable[[int, list[Any]], list[Any]]:  # fmt: skip
    """Returns a function that calls an operation on a part of the keys, given as keys, values and maybe documents.

    before, after: its operands before and behind keys and values.
    """
    own = documents[0] if documents else None
    first, second = rows.starts(0)

    def part(behind: int, moving: list[Any]) -> list[Any]:
        keys, values, *rest = moving
        first_key, second_key = rows.starts(behind)
        return at.several(
            target, *before, keys, values, *after, own, rest[0] if rest else None, call.scale, call.window, first,
            first_key, call.softcap, second, second_key, **rows.work(call, behind),
        )  # fmt: skip

    return part


PADDED_KEYS = ((1, 0.0), (2, 0.0))
"""The padding of k and v is set to 0 in a ring. No query sees it, but infinity times a weight of 0 is NaN."""
PADDED_GRADIENTS = tuple((operand, 0.0) for operand in range(6))
"""The padding of dout, q, k, v, out and lse is set to 0 in a ring, so that padded queries add nothing to dk and dv."""


def of_ring(s: int, sent: list[Value], fills: tuple[tuple[int, float], ...]) -> dict[str, Any]:
    """Returns a rule's fields for a ring over factor s, in which shards of the values `sent` reach all devices in turn.

    Shards of equal length follow each other, so that a device knows the positions of the keys that it receives. The
    padding behind the last key is hidden from all queries.
    """
    exchange = Exchange(s, sum(value.bytes for value in sent), len(sent), "ring")
    return {"exchanged": (exchange,), "trailing": (s,), "fills": fills}
