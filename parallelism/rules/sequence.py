"""The rules of causal attention whose sequence is sharded.

The alternative is to reshard from sequence to heads and back. Here every device keeps its queries. Either it gathers
all keys and values, or these rotate in a ring while the device computes with those it has (Liu et al. 2023). A ring
sends the same bytes, overlaps them with computation, and never holds all keys. Both work for tpshard's attention and
for torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tpshard.kernels.attention.attention import ATTENTION_PART, ATTENTION_PART_BACKWARD
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.rules.letters import Spelled
from tpshard.parallelism.rules.rotation import around, cast, merge, plus, start_of
from tpshard.parallelism.rules.rule import Exchange, LocalOp, Rule

aten = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """The settings and the order of dims with which an op calls causal attention."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    heads_first: bool = False
    """Whether heads come before the sequence, as in torch's attention: `q[b h s d]`, not `q[b s h d]`."""

    @property
    def length(self) -> int:
        """The dim of the sequence."""
        return 2 if self.heads_first else 1

    def letters(self, t: str) -> tuple[str, str, str]:
        """The dims of queries, of keys with the letter `t` in place of `s`, and of logsumexps.

        Query heads are KV heads k times groups g.
        """
        return ("b(kg)sD", f"bk{t}D", "b(kg)s") if self.heads_first else ("bs(kg)D", f"b{t}kD", "b(kg)s")

    def turn(self, at: LocalOp, node: Any) -> Any:
        """Permutes a node from the op's order of dims to tpshard's, or back."""
        return at.emit(aten.transpose.int, node, 1, 2) if self.heads_first else node


def forward(op: Op, flops: int, call: Call) -> tuple[Rule, ...]:
    """The rules of attention over a sharded sequence, by gathered keys and by a ring.

    The operands are q, k, v and maybe documents, the results out and lse. A ring needs as many keys as queries.
    """
    q, k = op.operands[:2]
    same_length = q.shape[call.length] == k.shape[call.length]
    return tuple(_forward(op, flops, call, ring) for ring in ((False, True) if same_length else (False,)))


def backward(op: Op, flops: int, call: Call) -> tuple[Rule, ...]:
    """The rules of attention's gradient over a sharded sequence, by gathered keys and by a ring.

    The operands are dout, q, k, v, out, lse and maybe documents, the results dq, dk and dv. With gathered keys every
    device has its queries' share of all keys' gradients.
    """
    q, k = op.operands[1:3]
    same_length = q.shape[call.length] == k.shape[call.length]
    return tuple(_backward(op, flops, call, ring) for ring in ((False, True) if same_length else (False,)))


def _forward(op: Op, flops: int, call: Call, ring: bool) -> Rule:
    t = "s" if ring else "T"
    q, k, lse = call.letters(t)
    spelled = Spelled(op, f"{q},{k},{k},b{t}->{q},{lse}")
    s = spelled.of["s"]

    def local(at: LocalOp, of: Mapping[str, int]) -> Any:
        if not at.axes(s):
            return at.same()
        queries, keys, values = (call.turn(at, node) for node in at.inputs[:3])
        part = _part(at, s, call, ring, ATTENTION_PART, (queries,), at.inputs[3:])
        join = partial(merge, at, heads_first=False)
        out, lse = around(at, s, at.members(s) if ring else 1, [keys, values, *at.inputs[3:]], part, join, staying=2)
        return [call.turn(at, out), lse]

    facts = of_ring(s, op.operands[1:], PADDED_KEYS) if ring else {}
    return spelled.rule(flops=flops, local=local, **facts)


def _backward(op: Op, flops: int, call: Call, ring: bool) -> Rule:
    t = "s" if ring else "T"
    q, k, lse = call.letters(t)
    spelled = Spelled(op, f"{q},{q},{k},{k},{q},{lse},b{t}->{q},{k},{k}")
    s = spelled.of["s"]

    def local(at: LocalOp, of: Mapping[str, int]) -> Any:
        if not at.axes(s):
            return at.same()
        grad, queries, keys, values, out = (call.turn(at, node) for node in at.inputs[:5])
        before, rest = (grad, queries), at.inputs[6:]
        part = _part(at, s, call, ring, ATTENTION_PART_BACKWARD, before, rest, after=(out, at.inputs[5]))
        members = at.members(s) if ring else 1
        totals = around(at, s, members, [keys, values, *rest], part, partial(plus, at), staying=1)
        return [call.turn(at, cast(at, node, at.dtype(i))) for i, node in enumerate(totals)]

    facts = of_ring(s, [*op.operands[2:4] * 2, *op.operands[6:]], PADDED_GRADIENTS) if ring else {}
    return spelled.rule(flops=flops, local=local, **facts)


def _part(
    at: LocalOp, s: int, call: Call, ring: bool, target: Any, before: Sequence[Any], documents: list[Any],
    after: Sequence[Any] = (),
) -> Callable[[int, list[Any]], list[Any]]:  # fmt: skip
    """Returns a function that calls an operation on a part of the keys, given as keys, values and maybe documents.

    before, after: its operands before and behind keys and values. documents: those of the op, if any.
    """
    first, own = at.offset(s), _own_documents(at, s, documents, ring)

    def part(behind: int, moving: list[Any]) -> list[Any]:
        keys, values, *rest = moving
        key_documents = rest[0] if rest else None
        return at.several(
            target, *before, keys, values, *after, own, key_documents, call.scale, call.window, first,
            start_of(at, s, behind) if ring else 0, call.softcap, work=1 / at.members(s) if ring else 1.0,
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
    exchange = Exchange(s, sum(value.bytes for value in sent), len(sent), rotating=True)
    return {"exchanged": (exchange,), "trailing": (s,), "fills": fills}


def _own_documents(at: LocalOp, factor: int, rest: list[Any], ring: bool) -> Any:
    """The document ids of this device's queries; None if there are none."""
    if not rest:
        return None
    (documents,) = rest
    if ring:
        return documents
    t, size = at.shape_of(documents)[1], at.size(factor)
    if size * at.members(factor) > t:  # queries behind the last one have no document
        documents = at.emit(aten.constant_pad_nd.default, documents, [0, size], -1)
    return at.emit(aten.narrow.default, documents, 1, at.offset(factor), size)
