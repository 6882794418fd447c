"""Which rows of a sharded sequence's queries a device computes: its shard, or a chunk and its mirror image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tpshard.parallelism.graph import Value
from tpshard.parallelism.rules.rotation import start_of
from tpshard.parallelism.rules.rule import LocalOp

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

    def within(self, k: Value) -> Call:
        """The same without a window that is as long as the keys, and hides none."""
        return replace(self, window=None) if self.window is not None and self.window >= k.shape[self.length] else self

    def letters(self, t: str) -> tuple[str, str, str]:
        """The dims of queries, of keys with the letter `t` in place of `s`, and of logsumexps.

        Query heads are KV heads k times groups g.
        """
        return ("b(kg)sD", f"bk{t}D", "b(kg)s") if self.heads_first else ("bs(kg)D", f"b{t}kD", "b(kg)s")

    def turn(self, at: LocalOp, node: Any) -> Any:
        """Permutes a node from the op's order of dims to tpshard's, or back."""
        return at.emit(aten.transpose.int, node, 1, 2) if self.heads_first else node


@dataclass(frozen=True)
class RowChunk:
    """A part of a device's rows that are consecutive positions, for keys that are not sharded."""

    at: LocalOp
    s: int
    begin: int
    length: int
    first: Any
    """The position of its first row."""
    work: dict[str, float]
    """Its share of the operation, as `LocalOp.several` takes it."""

    def of(self, node: Any, dim: int) -> Any:
        """Its part of a tensor of all rows."""
        if self.at.shape_of(node)[dim] == self.length:
            return node
        return self.at.emit(aten.narrow.default, node, dim, self.begin, self.length)

    def settings(self, call: Call, documents: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of `tpshard::attention_part` behind the tensors. documents: those of all keys, if any."""
        own, of_keys = None, None
        if documents:
            (of_keys,), at = documents, self.at
            t, padded = at.shape_of(of_keys)[1], at.size(self.s) * at.members(self.s)
            own = of_keys if padded <= t else at.emit(aten.constant_pad_nd.default, of_keys, [0, padded - t], -1)
            own = at.emit(aten.narrow.default, own, 1, self.first, self.length)  # -1: behind the last query
        return own, of_keys, call.scale, call.window, self.first, 0, call.softcap


class Rows:
    """A device's shard of the queries, in order."""

    def __init__(self, at: LocalOp, s: int):
        self.at, self.s, self.members, self.size = at, s, at.members(s), at.size(s)

    def enter(self, dim: int, *nodes: Any) -> list[Any]:
        """These rows of tensors, which have the device's shard of the sequence along `dim`."""
        return list(nodes)

    def leave(self, dim: int, *nodes: Any) -> list[Any]:
        """The device's shard of tensors that have these rows: the inverse of `enter`."""
        return list(nodes)

    def starts(self, behind: int) -> tuple[Any, Any]:
        """The first positions of both chunks, or of the shard and None, of the device `behind` places before this."""
        return start_of(self.at, self.s, behind), None

    def pieces(self, call: Call) -> list[RowChunk]:
        """The rows as consecutive positions."""
        busiest = 1.0 if call.window is not None else (2 * self.members - 1) / self.members
        return [RowChunk(self.at, self.s, 0, self.size, self.at.offset(self.s), {"work": 1.0, "busiest": busiest})]

    def work(self, call: Call, behind: int) -> dict[str, float]:
        """What of the operation the part with the keys of the device `behind` places before does, as
        `LocalOp.several` takes it: only later devices see all of them, the own ones half."""
        n = self.members
        if call.window is not None or behind == 0:
            return {"work": 1 / n}
        return {"work": 2 * (n - behind) / n**2, "busiest": n / (n - behind)}

    def joined(self, nodes: Sequence[Any], dim: int) -> Any:
        """The results of the pieces as one."""
        return nodes[0] if len(nodes) == 1 else self.at.emit(aten.cat.default, list(nodes), dim)


class MirroredRows(Rows):
    """Chunk d and chunk 2n - 1 - d on device d of n, of the sequence's 2n; the shard of device i is chunks 2i, 2i + 1.

    Of both chunks one is even, and comes from the first half of a shard, the other odd.
    """

    def __init__(self, at: LocalOp, s: int):
        super().__init__(at, s)
        self.half = self.size // 2

    def _owner(self, chunk: int) -> int:
        return min(chunk, 2 * self.members - 1 - chunk)

    def _chunk(self, device: int, parity: int) -> int:
        """The even (0) or odd (1) chunk of a device."""
        return device if device % 2 == parity else 2 * self.members - 1 - device

    def _pick(self, table: Sequence[int]) -> Any:
        return self.at.pick(self.s, table)

    def _begins(self, parity: int) -> Any:
        """Where the even or odd chunk begins among this device's rows."""
        return self._pick([0 if device % 2 == parity else self.half for device in range(self.members)])

    def enter(self, dim: int, *nodes: Any) -> list[Any]:
        return self._together(self._enter, dim, nodes)

    def leave(self, dim: int, *nodes: Any) -> list[Any]:
        return self._together(self._leave, dim, nodes)

    def _together(self, move: Any, dim: int, nodes: Sequence[Any]) -> list[Any]:
        """Moves tensors [b,s,h,d] that differ in their heads as one, so that few collectives are started."""
        at, heads = self.at, 2
        if len(nodes) < 2 or len({at.dtype_of(node) for node in nodes}) > 1:
            return [move(node, dim) for node in nodes]
        moved, begin, out = move(at.emit(aten.cat.default, list(nodes), heads), dim), 0, []
        for node in nodes:
            width = at.shape_of(node)[heads]
            out.append(at.emit(aten.narrow.default, moved, heads, begin, width))
            begin += width
        return out

    def _enter(self, node: Any, dim: int) -> Any:
        at, half, n = self.at, self.half, self.members
        even, odd = (
            at.send(self._narrow(node, dim, parity * half), self.s, [self._owner(2 * i + parity) for i in range(n)])
            for parity in (0, 1)
        )
        both = at.emit(aten.cat.default, [even, odd, even], dim)  # the lower chunk comes first
        return at.emit(aten.narrow.default, both, dim, self._begins(0), 2 * half)

    def _leave(self, node: Any, dim: int) -> Any:
        at, n = self.at, self.members
        halves = [
            at.send(
                self._narrow(node, dim, self._begins(parity)), self.s, [self._chunk(d, parity) // 2 for d in range(n)]
            )
            for parity in (0, 1)
        ]
        return at.emit(aten.cat.default, halves, dim)

    def _narrow(self, node: Any, dim: int, begin: Any) -> Any:
        return self.at.emit(aten.narrow.default, node, dim, begin, self.half)

    def starts(self, behind: int) -> tuple[Any, Any]:
        n, half = self.members, self.half
        places = [(device - behind) % n for device in range(n)]
        return self._pick([d * half for d in places]), self._pick([(2 * n - 1 - d) * half for d in places])

    def pieces(self, call: Call) -> list[RowChunk]:
        return [
            RowChunk(self.at, self.s, i * self.half, self.half, first, {"work": 0.5})
            for i, first in enumerate(self.starts(0))
        ]

    def work(self, call: Call, behind: int) -> dict[str, float]:
        return {"work": 1 / self.members}


def rows_of(at: LocalOp, s: int, mirrored: bool) -> Rows:
    """A device's rows of factor s; an odd number is not mirrored."""
    return MirroredRows(at, s) if mirrored and at.size(s) % 2 == 0 else Rows(at, s)
