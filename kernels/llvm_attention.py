"""Attention over a paged cache for a CPU, written for LLVM: what `kernels.paged_attention` computes.

A task is a row, a KV head, and up to HEADS of the query heads that share it. It reads the row's keys CHUNK positions at
a time, from the first of its window to its own, and keeps a running maximum, sum and result (online softmax: arXiv
1805.02867). The order of sums follows from the row's position alone and vectors have one width on every CPU, so that a
row's bits depend neither on the other rows and heads nor on the number of threads. Nothing outside the window is read.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from tpshard.kernels.llvm_writer import FLOAT, HALF, I16, I32, I64, Entry, Writer, integer

LANES = 8
"""Floats of a vector, on every CPU: the head dim is a multiple of it."""
HEADS = 4
CHUNK = 32
"""Positions at once; blocks of the cache divide it."""
ARGUMENTS = (
    "q", "k", "v", "out", "positions", "sequences", "tables", "rows", "heads", "kv_heads", "width", "shift", "window",
    "next",
)  # fmt: skip
"""The fields of the program: `width` blocks in a row of `tables`, each of 2**shift positions, of which a row reads
the last `window`."""
ENTRY = "paged_attention"


class AttentionWriter(Writer):
    """For heads of `dim` elements and a cache of `kind`: float, half, or i16 for the upper half of a float."""

    def __init__(self, dim: int, kind: Any) -> None:
        super().__init__("attention", LANES)
        self.dim, self.kind, self.parts = dim, kind, [integer(first) for first in range(0, dim, LANES)]

    def cached(self, b: Any, pool: Any, index: Any) -> Any:
        """Floats of the cache."""
        value = self.load(b, self.kind, pool, index)
        if self.kind == HALF:
            return b.fpext(value, self.floats)
        if self.kind == I16:
            return b.bitcast(b.shl(b.zext(value, self.ints), ir.Constant(self.ints, [16] * LANES)), self.floats)
        return value

    def larger(self, b: Any, x: Any, y: Any) -> Any:
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    def attend(self, heads: int) -> Any:
        """attend_n(q, out, k, v, table, shift, stride, oldest, last): n query heads [n, dim] of one KV head, whose
        entries lie `stride` elements apart, over positions `oldest` to `last`."""
        pointers = [t.as_pointer() for t in (FLOAT, FLOAT, self.kind, self.kind, I64)]
        made, b = self.function(f"attend_{heads}", [*pointers, I64, I64, I64, I64])
        q, out, k, v, table, shift, stride, oldest, last = made.args
        places = [[b.add(integer(head * self.dim), part) for part in self.parts] for head in range(heads)]
        scores = b.bitcast(b.alloca(ir.ArrayType(FLOAT, heads * CHUNK)), FLOAT.as_pointer())
        for place in (place for each in places for place in each):
            self.store(b, self.constant(0.0), out, place)
        lowest, nothing = ir.Constant(FLOAT, float("-inf")), ir.Constant(FLOAT, 0.0)
        within = b.sub(b.shl(integer(1), shift), integer(1))

        def entry(position: Any) -> Any:
            """Where a position's key and value begin."""
            block = b.load(b.gep(table, [b.lshr(position, shift)]))
            return b.mul(b.add(b.shl(block, shift), b.and_(position, within)), stride)

        carried = [value for _ in range(heads) for value in (lowest, nothing)]
        with self.loop(b, oldest, b.add(last, integer(1)), CHUNK, carried) as chunk:
            first, stop = chunk.index, b.add(chunk.index, integer(CHUNK))
            stop = b.select(b.icmp_signed("<=", stop, last), stop, b.add(last, integer(1)))
            for place in range(0, heads * CHUNK, LANES):
                self.store(b, self.constant(float("-inf")), scores, integer(place))
            with self.loop(b, first, stop, 1) as position:
                begin = entry(position.index)
                keys = [self.cached(b, k, b.add(begin, part)) for part in self.parts]
                for head in range(heads):
                    total = b.fmul(self.load(b, FLOAT, q, places[head][0]), keys[0])
                    for place, key in zip(places[head][1:], keys[1:]):
                        total = self.fma(b, self.load(b, FLOAT, q, place), key, total)
                    at = b.add(integer(head * CHUNK), b.sub(position.index, first))
                    b.store(self.folded(b, total, b.fadd), b.gep(scores, [at]))
            known = list(zip(chunk.values[::2], chunk.values[1::2]))
            chunk.next = [value for head in range(heads) for value in self.weigh(b, scores, head, known[head], out)]
            for some in (self.parts[i : i + 2] for i in range(0, len(self.parts), 2)):
                where = [b.add(integer(head * self.dim), part) for head in range(heads) for part in some]
                sums = [self.load(b, FLOAT, out, place) for place in where]
                with self.loop(b, first, stop, 1, sums) as position:
                    begin = entry(position.index)
                    values = [self.cached(b, v, b.add(begin, part)) for part in some]
                    sums = list(position.values)
                    for head in range(heads):
                        at = b.add(integer(head * CHUNK), b.sub(position.index, first))
                        weight = self.spread(b, scores, at)
                        for j, value in enumerate(values):
                            which = head * len(some) + j
                            sums[which] = self.fma(b, weight, value, sums[which])
                    position.next = sums
                for place, total in zip(where, position.results):
                    self.store(b, total, out, place)
        for head in range(heads):
            inverse = self.filled(b, b.fdiv(ir.Constant(FLOAT, 1.0), chunk.results[2 * head + 1]), self.floats)
            for place in places[head]:
                self.store(b, b.fmul(self.load(b, FLOAT, out, place), inverse), out, place)
        b.ret_void()
        return made

    def weigh(self, b: Any, scores: Any, head: int, known: tuple[Any, Any], out: Any) -> tuple[Any, Any]:
        """A chunk's scores become exp(score - maximum), and what is known so far is brought to the new maximum: the
        result in `out`, and the (maximum, sum) that it returns."""
        maximum, total = known
        at = [integer(head * CHUNK + first) for first in range(0, CHUNK, LANES)]
        found = [self.load(b, FLOAT, scores, place) for place in at]
        most = found[0]
        for vector in found[1:]:
            most = self.larger(b, most, vector)
        new = self.larger(b, maximum, self.folded(b, most, lambda x, y: self.larger(b, x, y)))
        least = self.filled(b, new, self.floats)
        weights = [self.exp(b, b.fsub(vector, least)) for vector in found]
        for place, vector in zip(at, weights):
            self.store(b, vector, scores, place)
        added = weights[0]
        for vector in weights[1:]:
            added = b.fadd(added, vector)
        kept = self.exp(b, self.filled(b, b.fsub(maximum, new), self.floats))
        for part in self.parts:
            place = b.add(integer(head * self.dim), part)
            self.store(b, b.fmul(self.load(b, FLOAT, out, place), kept), out, place)
        kept_total = b.fmul(total, b.extract_element(kept, ir.Constant(I32, 0)))
        return new, b.fadd(kept_total, self.folded(b, added, b.fadd))

    def program(self) -> None:
        """paged_attention(arguments): takes tasks until none is left; for any number of threads at once."""
        several, one = self.attend(HEADS), self.attend(1)
        pointers = {"q": FLOAT, "k": self.kind, "v": self.kind, "out": FLOAT}
        entry = self.entry(ENTRY, ARGUMENTS, pointers | dict.fromkeys(("positions", "sequences", "tables"), I64))
        b, value = entry.b, entry.given
        shared = b.udiv(value["heads"], value["kv_heads"])
        parts = b.udiv(b.add(shared, integer(HEADS - 1)), integer(HEADS))
        of_row = b.mul(value["kv_heads"], parts)
        with self.tasks(entry, 1, b.mul(value["rows"], of_row)) as task:
            row, rest = b.udiv(task, of_row), b.urem(task, of_row)
            self.task(entry, row, b.udiv(rest, parts), b.mul(b.urem(rest, parts), integer(HEADS)), shared, several, one)

    def task(self, entry: Entry, row: Any, kv_head: Any, first: Any, shared: Any, several: Any, one: Any) -> None:
        """A row's query heads from the `first` on of those that share a KV head."""
        b, value, at = entry.b, entry.given, entry.at
        stride = b.mul(value["kv_heads"], integer(self.dim))
        head = b.add(b.mul(kv_head, shared), first)
        start = b.mul(b.add(b.mul(row, value["heads"]), head), integer(self.dim))
        mine = b.mul(kv_head, integer(self.dim))
        sequence = b.load(b.gep(at["sequences"], [row]))
        table = b.gep(at["tables"], [b.mul(sequence, value["width"])])
        k, v = (b.gep(at[name], [mine]) for name in "kv")
        last = b.load(b.gep(at["positions"], [row]))
        oldest = b.add(b.sub(last, value["window"]), integer(1))
        oldest = b.select(b.icmp_signed(">", oldest, integer(0)), oldest, integer(0))
        rest = [k, v, table, value["shift"], stride, oldest, last]
        left = b.sub(shared, first)
        with b.if_else(b.icmp_signed(">=", left, integer(HEADS))) as (whole, part):
            with whole:
                b.call(several, [b.gep(at["q"], [start]), b.gep(at["out"], [start]), *rest])
            with part, self.loop(b, integer(0), left, 1) as each:
                place = b.add(start, b.mul(each.index, integer(self.dim)))
                b.call(one, [b.gep(at["q"], [place]), b.gep(at["out"], [place]), *rest])


KINDS = {"float32": FLOAT, "float16": HALF, "bfloat16": I16}
"""How elements of a cache are loaded, by the name of its dtype."""


def module(dim: int, dtype: str) -> str:
    """The program as LLVM's text."""
    writer = AttentionWriter(dim, KINDS[dtype])
    writer.program()
    return str(writer.module)
