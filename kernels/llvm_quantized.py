"""The product with quantized weights for a CPU, written for LLVM, which makes it for the CPU that it runs on.

    out [rows, columns] = x [rows, inputs] @ w,    w[k, n] = scales[g, n] * (codes[k, n] - zeros[g, n])

Weights are rounded to fp16, which is what files mean by them; all else is fp32. They lie as `kernels.blocked` says:
panels of COLUMNS columns, spans of at most SPAN inputs that share a group g, chunks of CHUNK inputs. Threads take
panels until none is left. A column has at most 16 weights in a group: they are computed once for a span, and codes look
them up a chunk at a time (codes of 8 bits are computed with instead). The first FEW rows use a weight while it is in
a register; where there are more, they leave a span's weights in a buffer that fits the first cache for the others.

A vector holds successive inputs. Every element of the result is as many chains of fused multiply-adds as a vector has
lanes, spans in ascending order, joined at the end in one order, on either way: a row's bits depend neither on the other
rows nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from tpshard.kernels.blocked import CHUNK, COLUMNS, SPAN
from tpshard.kernels.llvm_writer import FLOAT, HALF, I8, I32, I64, Entry, Writer, integer

FEW = 8
"""Rows whose sums fit the registers beside a decoded chunk."""
TILE = 3
"""Rows multiplied at once from the buffer, by ACROSS columns: twelve sums, the rows and a column fill 16 registers."""
ACROSS = 4
MANY = 64
"""Rows that share a decoded span: their sums, 32 KiB, stay in the second cache."""
ARGUMENTS = (
    "x", "codes", "scales", "zeros", "out", "ends", "rows", "stride", "panels", "groups", "spans", "bytes", "next",
)  # fmt: skip
"""The 64-bit fields that the program takes a pointer to: addresses, sizes (`stride` floats from a row of x to the next,
`bytes` of codes in a panel), and the panel that is next to be taken."""
ENTRY = "quantized_product"
_KNOWN = 32
"""Bytes that are known of a column in a group: its 16 weights as fp16, low bytes first; or scale and shift."""
_TABLE = "llvm.aarch64.neon.tbl1.v16i8"
_LOOKUP = {"x86_64": "llvm.x86.ssse3.pshuf.b.128", "aarch64": _TABLE, "arm64": _TABLE}
"""(16 bytes, 16 places) -> the bytes at these places, by LLVM's name of the architecture."""
_BYTES = ir.VectorType(I8, 16)


class ProductWriter(Writer):
    """For codes of `bits` (2, 4 or 8)."""

    def __init__(self, bits: int, lanes: int, architecture: str) -> None:
        super().__init__("quantized", lanes)
        self.bits, self.chunk_bytes = bits, CHUNK * bits // 8
        kind = ir.FunctionType(_BYTES, [_BYTES, _BYTES])
        self._lookup = ir.Function(self.module, kind, _LOOKUP[architecture])
        self._wide = ir.VectorType(FLOAT, 16)

    # Weights

    def knowing(self) -> Any:
        """know(scales, zeros, known): what is known of each column in a group, [COLUMNS, _KNOWN] bytes.

        A weight is scale * code + shift. An fp16 scale times a zero of 8 bits is exact in fp32, and so is the weight,
        which is then rounded once.
        """
        made, b = self.function("know", [HALF.as_pointer(), I8.as_pointer(), I8.as_pointer()])
        scales, zeros, known = made.args
        scale = b.fpext(self.whole(b, scales, HALF, COLUMNS), self._wide)
        shift = b.fneg(b.fmul(b.uitofp(self.whole(b, zeros, I8, COLUMNS), self._wide), scale))
        pairs = b.bitcast(b.alloca(ir.ArrayType(FLOAT, 2 * COLUMNS)), FLOAT.as_pointer())
        for i, vector in enumerate((scale, shift)):
            self.keep(b, vector, b.gep(pairs, [integer(i * COLUMNS)]))
        with self.loop(b, integer(0), integer(COLUMNS), 1) as column:
            pair = [b.load(b.gep(pairs, [b.add(column.index, integer(i * COLUMNS))])) for i in (0, 1)]
            place = b.gep(known, [b.mul(column.index, integer(_KNOWN))])
            if self.bits == 8:
                for i, value in enumerate(pair):
                    b.store(value, b.gep(b.bitcast(place, FLOAT.as_pointer()), [integer(i)]))
            else:
                codes = ir.Constant(self._wide, [float(code) for code in range(16)])
                exact = self.fma(b, codes, *(self.filled(b, value, self._wide) for value in pair))
                raw = b.bitcast(b.fptrunc(exact, ir.VectorType(HALF, 16)), ir.VectorType(I8, 32))
                halves = [self.picked(b, raw, [*range(i, i + 16, 2), *range(i + 1, i + 16, 2)]) for i in (0, 16)]
                order = [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]
                self.keep(b, self.picked(b, halves[0], order, halves[1]), place)
        b.ret_void()
        return made

    def codes(self, b: Any, chunk: Any) -> list[Any]:
        """A chunk's codes, a byte each, in two vectors."""
        raw = self.whole(b, chunk, I8, self.chunk_bytes)

        def each(value: int) -> Any:
            return ir.Constant(raw.type, [value] * self.chunk_bytes)

        fields = [b.and_(b.lshr(raw, each(shift)), each((1 << self.bits) - 1)) for shift in range(0, 8, self.bits)]
        if len(fields) == 4:
            fields = [self.picked(b, x, range(16), y) for x, y in zip(fields[::2], fields[1::2])]
        return fields if len(fields) == 2 else [self.picked(b, raw, range(i, i + 16)) for i in (0, 16)]

    def weights(self, b: Any, chunk: Any, known: Sequence[Any]) -> list[Any]:
        """A chunk's weights of a column, as vectors of `lanes` inputs."""
        found = []
        for codes in self.codes(b, chunk):
            if self.bits == 8:
                exact = self.fma(b, b.uitofp(codes, self._wide), *known)
                halves = b.fptrunc(exact, ir.VectorType(HALF, 16))
            else:
                low, high = (b.call(self._lookup, [table, codes]) for table in known)
                mixed = self.picked(b, low, [i for pair in zip(range(16), range(16, 32)) for i in pair], high)
                halves = b.bitcast(mixed, ir.VectorType(HALF, 16))
            for first in range(0, 16, self.lanes):
                part = self.picked(b, halves, range(first, first + self.lanes))
                found.append(b.fpext(part, self.floats))
        return found

    def known(self, b: Any, known: Any, column: Any) -> list[Any]:
        """Of a column, as `weights` wants it."""
        place = b.gep(known, [b.mul(column, integer(_KNOWN))])
        if self.bits == 8:
            pair = b.bitcast(place, FLOAT.as_pointer())
            return [self.filled(b, b.load(b.gep(pair, [integer(i)])), self._wide) for i in (0, 1)]
        return [self.whole(b, b.gep(place, [integer(i)]), I8, 16) for i in (0, 16)]

    def chunk_of(self, b: Any, codes: Any, index: Any) -> Any:
        """Where the chunk begins whose first input is `index`."""
        return b.gep(codes, [b.mul(b.udiv(index, integer(CHUNK)), integer(self.chunk_bytes))])

    # Products

    def fused(self, rows: int, keep: bool = False) -> Any:
        """fused(x, stride, sums, size, codes, known, w): sums [rows, COLUMNS, lanes] += x [rows, size] @ w. With `keep`
        the weights are left in w [COLUMNS, SPAN] for further rows."""
        pointer, byte = FLOAT.as_pointer(), I8.as_pointer()
        name = f"{'kept' if keep else 'fused'}_{rows}"
        made, b = self.function(name, [pointer, I64, pointer, I64, byte, byte, pointer])
        x, stride, sums, size, codes, known, w = made.args
        rows_of_x = [b.gep(x, [b.mul(integer(row), stride)]) for row in range(rows)]
        with self.loop(b, integer(0), integer(COLUMNS), 1) as column:
            mine = self.known(b, known, column.index)
            chunks = self.chunk_of(b, codes, b.mul(column.index, size))
            places = [self.sum_of(b, row, column.index) for row in range(rows)]
            totals = [self.load(b, FLOAT, sums, place) for place in places]
            with self.loop(b, integer(0), size, CHUNK, totals) as k:
                totals = list(k.values)
                for i, weight in enumerate(self.weights(b, self.chunk_of(b, chunks, k.index), mine)):
                    index = b.add(k.index, integer(i * self.lanes))
                    if keep:
                        self.store(b, weight, w, b.add(b.mul(column.index, integer(SPAN)), index))
                    for row, source in enumerate(rows_of_x):
                        totals[row] = self.fma(b, self.load(b, FLOAT, source, index), weight, totals[row])
                k.next = totals
            for place, total in zip(places, k.results):
                self.store(b, total, sums, place)
        b.ret_void()
        return made

    def tile(self, rows: int) -> Any:
        """tile(x, stride, sums, size, w): as `fused`, with w as it was left; ACROSS columns at once."""
        pointer = FLOAT.as_pointer()
        made, b = self.function(f"tile_{rows}", [pointer, I64, pointer, I64, pointer])
        x, stride, sums, size, w = made.args
        rows_of_x = [b.gep(x, [b.mul(integer(row), stride)]) for row in range(rows)]
        with self.loop(b, integer(0), integer(COLUMNS), ACROSS) as first:
            columns = [b.add(first.index, integer(i)) for i in range(ACROSS)]
            sources = [b.gep(w, [b.mul(column, integer(SPAN))]) for column in columns]
            places = [self.sum_of(b, row, column) for column in columns for row in range(rows)]
            totals = [self.load(b, FLOAT, sums, place) for place in places]
            with self.loop(b, integer(0), size, self.lanes, totals) as k:
                values = [self.load(b, FLOAT, source, k.index) for source in rows_of_x]
                for i, source in enumerate(sources):
                    weight = self.load(b, FLOAT, source, k.index)
                    k.next += [self.fma(b, x, weight, k.values[i * rows + row]) for row, x in enumerate(values)]
            for place, total in zip(places, k.results):
                self.store(b, total, sums, place)
        b.ret_void()
        return made

    def sum_of(self, b: Any, row: int, column: Any) -> Any:
        return b.add(b.mul(column, integer(self.lanes)), integer(row * COLUMNS * self.lanes))

    def joined(self, b: Any, vectors: list[Any]) -> Any:
        """The sums over all lanes of as many vectors as a vector has lanes."""
        size = self.lanes
        while len(vectors) > 1:
            size //= 2
            first = [i + j for i in range(0, self.lanes, 2 * size) for j in range(size)]
            halves = [[*(i + more for i in first), *(i + more + self.lanes for i in first)] for more in (0, size)]
            pairs = list(zip(vectors[::2], vectors[1::2]))
            vectors = [b.fadd(*(self.picked(b, x, half, y) for half in halves)) for x, y in pairs]
        return vectors[0]

    # The program

    def program(self) -> None:
        """quantized_product(arguments): takes panels until none is left; for any number of threads at once."""
        know, kept = self.knowing(), self.fused(FEW, keep=True)
        fused = [self.fused(rows) for rows in range(1, FEW + 1)]
        tiles = [self.tile(rows) for rows in range(1, TILE + 1)]
        pointers = {"x": FLOAT, "codes": I8, "scales": HALF, "zeros": I8, "out": FLOAT, "ends": I32}
        entry = self.entry(ENTRY, ARGUMENTS, pointers)
        b, value = entry.b, entry.given
        known = self.room(b, I8, COLUMNS * _KNOWN)
        sums, w = self.room(b, FLOAT, MANY * COLUMNS * self.lanes), self.room(b, FLOAT, COLUMNS * SPAN)

        def multiply(count: Any, x: Any, codes: Any, size: Any) -> None:
            given = [x, value["stride"], sums, size, codes, known, w]
            with b.if_else(b.icmp_signed("<=", count, integer(FEW))) as (few, many):
                with few:
                    self.by_count(b, count, fused, given)
                with many:
                    b.call(kept, given)
                    with self.loop(b, integer(FEW), count, TILE) as row:
                        source = b.gep(x, [b.mul(row.index, value["stride"])])
                        mine = b.gep(sums, [b.mul(row.index, integer(COLUMNS * self.lanes))])
                        left = self.smaller(b, b.sub(count, row.index), TILE)
                        self.by_count(b, left, tiles, [source, value["stride"], mine, size, w])

        blocks = b.udiv(b.add(value["rows"], integer(MANY - 1)), integer(MANY))
        # all panels for some rows, then the next rows: these stay in the second cache meanwhile
        with self.tasks(entry, 1, b.mul(blocks, value["panels"])) as task:
            first = b.mul(b.udiv(task, value["panels"]), integer(MANY))
            count = self.smaller(b, b.sub(value["rows"], first), MANY)
            self.rows(entry, b.urem(task, value["panels"]), first, count, know, known, sums, multiply)

    def rows(
        self, entry: Entry, panel: Any, first: Any, count: Any, know: Any, known: Any, sums: Any,
        multiply: Callable[..., None],
    ) -> None:  # fmt: skip
        """`count` rows from `first` on of a panel's columns."""
        b, value, at = entry.b, entry.given, entry.at
        row_sums = integer(COLUMNS * self.lanes)
        with self.loop(b, integer(0), b.mul(count, row_sums), self.lanes) as place:
            self.store(b, self.constant(0.0), sums, place.index)
        x = b.gep(at["x"], [b.mul(first, value["stride"])])
        begin = b.gep(at["codes"], [b.mul(panel, value["bytes"])])
        with self.loop(b, integer(0), value["spans"], 1, [integer(0), begin]) as span:
            start, codes = span.values
            ends = b.gep(at["ends"], [b.mul(span.index, integer(2))])
            stop, group = (b.sext(b.load(b.gep(ends, [integer(i)])), I64) for i in (0, 1))
            size = b.and_(b.add(b.sub(stop, start), integer(CHUNK - 1)), integer(-CHUNK))
            of_group = b.mul(b.add(b.mul(panel, value["groups"]), group), integer(COLUMNS))
            b.call(know, [b.gep(at["scales"], [of_group]), b.gep(at["zeros"], [of_group]), known])
            multiply(count, b.gep(x, [start]), codes, size)
            span.next = [stop, self.chunk_of(b, codes, b.mul(size, integer(COLUMNS)))]
        width = b.mul(value["panels"], integer(COLUMNS))
        with self.loop(b, integer(0), count, 1) as row:
            mine = b.gep(sums, [b.mul(row.index, row_sums)])
            out = b.gep(at["out"], [b.add(b.mul(b.add(first, row.index), width), b.mul(panel, integer(COLUMNS)))])
            for column in range(0, COLUMNS, self.lanes):
                vectors = [self.load(b, FLOAT, mine, integer((column + i) * self.lanes)) for i in range(self.lanes)]
                self.store(b, self.joined(b, vectors), out, integer(column))


def module(bits: int, lanes: int, architecture: str) -> str:
    """The program as LLVM's text."""
    writer = ProductWriter(bits, lanes, architecture)
    writer.program()
    return str(writer.module)
