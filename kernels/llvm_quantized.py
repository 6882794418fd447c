"""The product with quantized weights for a CPU, written for LLVM, which makes it for the CPU that it runs on.

    out [rows, columns] = x [rows, inputs] @ w,    w[k, n] = scales[g, n] * (codes[k, n] - zeros[g, n])

Weights are rounded to fp16, which is what files mean by them; all else is fp32. They lie as `kernels.blocked` says:
blocks of COLUMNS columns, spans of at most SPAN inputs that share a group g. Threads take panels of PANEL blocks until
none is left. For a few rows (FUSED) a weight is decoded in registers and used at once. For more, a span of a panel is
decoded into a buffer that fits the first cache, once for all rows, and multiplied from there by tiles of SUMS vectors.

Every element of the result is one chain of fused multiply-adds, inputs in ascending order, on either way and whatever
the width of a vector: a row's bits depend neither on the other rows, nor on the number of threads, nor on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from tpshard.kernels.llvm_writer import FLOAT, HALF, I8, I32, I64, Entry, Writer, integer

COLUMNS = 16
"""Columns of a block: one vector of the widest CPUs, two or four of others."""
SPAN = 128
"""Inputs decoded at once: with PANEL blocks 16 KiB, half of a common first cache."""
PANEL = 2
AHEAD = 1024
"""Bytes of codes fetched ahead of use: blocks take turns by span, which no CPU foresees."""
FUSED = 4
"""Rows up to which decoding for each use is cheaper than a buffer."""
SUMS = 8
"""Vectors of sums that a tile has: as many as two multiply-adds at a time, of four cycles each, can keep busy."""
ARGUMENTS = ("x", "codes", "scales", "zeros", "out", "ends", "rows", "inputs", "blocks", "groups", "spans", "next")
"""The 64-bit fields that the program takes a pointer to: addresses, sizes, and the panel that is next to be taken."""
ENTRY = "quantized_product"


class ProductWriter(Writer):
    """For codes of `bits` (1, 2, 4 or 8)."""

    def __init__(self, bits: int, lanes: int) -> None:
        super().__init__("quantized", lanes)
        self.bits, self.per_byte = bits, 8 // bits
        self.halves = ir.VectorType(HALF, lanes)
        self.parts = [integer(first) for first in range(0, COLUMNS, lanes)]
        """Where the vectors of a block begin."""
        self.tile_rows = SUMS // len(self.parts)
        ahead = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        self._prefetch = ir.Function(self.module, ahead, "llvm.prefetch.p0")

    # Weights

    def scales(self, b: Any, scales: Any, zeros: Any) -> list[tuple[Any, Any]]:
        """(scale, shift) of every vector of a block, so that a weight is scale * code + shift. An fp16 scale times a
        zero of 8 bits is exact in fp32, and so is the weight, which is then rounded once."""
        found = []
        for part in self.parts:
            scale = b.fpext(self.load(b, HALF, scales, part), self.floats)
            zero = b.uitofp(b.zext(self.load(b, I8, zeros, part), self.ints), self.floats)
            found.append((scale, b.fneg(b.fmul(zero, scale))))
        return found

    def decoded(self, b: Any, codes: Any, index: Any, scales: list[tuple[Any, Any]]) -> list[list[Any]]:
        """The weights [input][vector] of the inputs that share a byte, from input `index` on."""
        row = b.mul(b.udiv(index, integer(self.per_byte)), integer(COLUMNS))
        ahead = b.gep(codes, [b.add(row, integer(AHEAD))])
        b.call(self._prefetch, [ahead, *(ir.Constant(I32, n) for n in (0, 3, 1))])  # to read, to stay, data
        raw = [b.zext(self.load(b, I8, codes, b.add(row, part)), self.ints) for part in self.parts]
        mask = ir.Constant(self.ints, [(1 << self.bits) - 1] * self.lanes)
        found = []
        for place in range(self.per_byte):
            shift = ir.Constant(self.ints, [self.bits * place] * self.lanes)
            fields = [b.and_(b.lshr(r, shift), mask) for r in raw]
            exact = [self.fma(b, b.uitofp(f, self.floats), *scale) for f, scale in zip(fields, scales)]
            found.append([b.fpext(b.fptrunc(w, self.halves), self.floats) for w in exact])
        return found

    def staging(self) -> Any:
        """decode(codes, scales, zeros, w, start, end): inputs start to end of a block -> w [end - start, COLUMNS]"""
        types = [t.as_pointer() for t in (I8, HALF, I8, FLOAT)] + [I64] * 2
        made, b = self.function("decode", types)
        codes, scales, zeros, w, start, end = made.args
        known = self.scales(b, scales, zeros)
        with self.loop(b, start, end, self.per_byte) as k:
            for place, weights in enumerate(self.decoded(b, codes, k.index, known)):
                row = b.mul(b.add(b.sub(k.index, start), integer(place)), integer(COLUMNS))
                for part, weight in zip(self.parts, weights):
                    self.store(b, weight, w, b.add(row, part))
        b.ret_void()
        return made

    # Products

    def tile(self, rows: int, fused: bool) -> Any:
        """tile(x, x_stride, out, out_stride, start, end, ...): out [rows, COLUMNS] += x [rows, start:end] @ w, of a
        block's `w` as it was staged, or its `codes, scales, zeros`."""
        weights = (I8, HALF, I8) if fused else (FLOAT,)
        types = [FLOAT.as_pointer(), I64, FLOAT.as_pointer(), I64, I64, I64, *(t.as_pointer() for t in weights)]
        made, b = self.function(f"{'fused' if fused else 'tile'}_{rows}", types)
        x, x_stride, out, out_stride, start, end, *source = made.args
        known = self.scales(b, *source[1:]) if fused else []
        places = [b.add(b.mul(integer(row), out_stride), part) for row in range(rows) for part in self.parts]
        sums = [self.load(b, FLOAT, out, place) for place in places]
        with self.loop(b, start, end, self.per_byte, sums) as k:
            sums = list(k.values)
            decoded = self.decoded(b, source[0], k.index, known) if fused else []
            for place in range(self.per_byte):
                index = b.add(k.index, integer(place))
                if not fused:
                    row = b.mul(b.sub(index, start), integer(COLUMNS))
                    decoded.append([self.load(b, FLOAT, source[0], b.add(row, part)) for part in self.parts])
                for row in range(rows):
                    one = self.spread(b, x, b.add(b.mul(integer(row), x_stride), index))
                    for j, weight in enumerate(decoded[place]):
                        which = row * len(self.parts) + j
                        sums[which] = self.fma(b, one, weight, sums[which])
            k.next = sums
        for at, total in zip(places, k.results):
            self.store(b, total, out, at)
        b.ret_void()
        return made

    def program(self) -> None:
        """quantized_product(arguments): takes panels until none is left; for any number of threads at once."""
        decode = self.staging()
        fused = [self.tile(rows, True) for rows in range(1, FUSED + 1)]
        tiles = [self.tile(rows, False) for rows in range(1, self.tile_rows + 1)]
        pointers = {"x": FLOAT, "codes": I8, "scales": HALF, "zeros": I8, "out": FLOAT, "ends": I32}
        entry = self.entry(ENTRY, ARGUMENTS, pointers)
        buffer = entry.b.alloca(ir.ArrayType(FLOAT, PANEL * SPAN * COLUMNS))
        with self.tasks(entry, PANEL, entry.given["blocks"]) as first:
            self.panel(entry, first, entry.b.bitcast(buffer, FLOAT.as_pointer()), decode, fused, tiles)

    def panel(self, entry: Entry, first: Any, buffer: Any, decode: Any, fused: list[Any], tiles: list[Any]) -> None:
        """All rows of the blocks of a panel."""
        b, value, at = entry.b, entry.given, entry.at
        rows, inputs, columns = value["rows"], value["inputs"], b.mul(value["blocks"], integer(COLUMNS))
        code_bytes = b.mul(b.udiv(inputs, integer(self.per_byte)), integer(COLUMNS))
        few = b.icmp_signed("<=", rows, integer(FUSED))
        end = b.add(first, integer(PANEL))
        end = b.select(b.icmp_signed("<", end, value["blocks"]), end, value["blocks"])

        def each_block(action: Callable[[Any], None]) -> None:
            with self.loop(b, first, end, 1) as block:
                action(block.index)

        def result(row: Any, block: Any) -> Any:
            return b.gep(at["out"], [b.add(b.mul(row, columns), b.mul(block, integer(COLUMNS)))])

        def clear(row: Any, block: Any) -> None:
            for part in self.parts:
                self.store(b, self.constant(0.0), result(row, block), part)

        with self.loop(b, integer(0), rows, 1) as row:
            each_block(lambda block: clear(row.index, block))
        with self.loop(b, integer(0), value["spans"], 1, [integer(0)]) as span:
            (start,) = span.values
            stop, group = (
                b.sext(b.load(b.gep(at["ends"], [b.add(b.mul(span.index, integer(2)), integer(i))])), I64)
                for i in (0, 1)
            )
            span.next = [stop]

            def coded(block: Any) -> list[Any]:
                """A block's codes, and its scales and zeros of the span."""
                known = b.mul(b.add(b.mul(block, value["groups"]), group), integer(COLUMNS))
                codes = b.gep(at["codes"], [b.mul(block, code_bytes)])
                return [codes, b.gep(at["scales"], [known]), b.gep(at["zeros"], [known])]

            def staged(block: Any) -> Any:
                return b.gep(buffer, [b.mul(b.sub(block, first), integer(SPAN * COLUMNS))])

            def multiply(function: Any, row: Any, weights: Callable[[Any], list[Any]]) -> None:
                x = b.gep(at["x"], [b.mul(row, inputs)])
                each_block(
                    lambda block: b.call(
                        function, [x, inputs, result(row, block), columns, start, stop, *weights(block)]
                    )
                )

            with b.if_else(few) as (then, otherwise):
                with then:
                    for count, function in enumerate(fused, 1):
                        with b.if_then(b.icmp_signed("==", rows, integer(count))):
                            multiply(function, integer(0), coded)
                with otherwise:
                    each_block(lambda block: b.call(decode, [*coded(block), staged(block), start, stop]))
                    whole = b.sub(rows, b.srem(rows, integer(self.tile_rows)))
                    with self.loop(b, integer(0), whole, self.tile_rows) as row:
                        multiply(tiles[-1], row.index, lambda block: [staged(block)])
                    for count, function in enumerate(tiles[:-1], 1):
                        with b.if_then(b.icmp_signed("==", b.sub(rows, whole), integer(count))):
                            multiply(function, whole, lambda block: [staged(block)])


def module(bits: int, lanes: int) -> str:
    """The program as LLVM's text."""
    writer = ProductWriter(bits, lanes)
    writer.program()
    return str(writer.module)
