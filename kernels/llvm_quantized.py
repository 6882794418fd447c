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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llvmlite import ir

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

_I8, _I32, _I64, _HALF, _FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType()


def _int(value: int) -> Any:
    return ir.Constant(_I64, value)


@dataclass
class Writer:
    """Writes the functions of one module: for codes of `bits` (1, 2, 4 or 8), in vectors of `lanes`."""

    bits: int
    lanes: int
    module: Any = field(default_factory=lambda: ir.Module("quantized"))

    def __post_init__(self) -> None:
        self.per_byte = 8 // self.bits
        self.floats = ir.VectorType(_FLOAT, self.lanes)
        self.ints = ir.VectorType(_I32, self.lanes)
        self.halves = ir.VectorType(_HALF, self.lanes)
        self.parts = [_int(first) for first in range(0, COLUMNS, self.lanes)]
        """Where the vectors of a block begin."""
        fused = ir.FunctionType(self.floats, [self.floats] * 3)
        self.tile_rows = SUMS // len(self.parts)
        self._fma = ir.Function(self.module, fused, f"llvm.fma.v{self.lanes}f32")
        ahead = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        self._prefetch = ir.Function(self.module, ahead, "llvm.prefetch.p0")

    # What all functions are made of. `b` is the place where instructions are being written.

    def function(self, name: str, types: Sequence[Any]) -> tuple[Any, Any]:
        """A function that no other module sees, and where its instructions go."""
        made = ir.Function(self.module, ir.FunctionType(ir.VoidType(), types), name)
        made.linkage = "internal"
        made.attributes.add("noinline")  # in a larger function LLVM runs out of registers
        return made, ir.IRBuilder(made.append_basic_block("entry"))

    @contextmanager
    def loop(self, b: Any, start: Any, stop: Any, step: int, carried: Sequence[Any] = ()) -> Iterator[Loop]:
        """for index in range(start, stop, step), with values that an iteration hands to the next."""
        before, body, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
        b.cbranch(b.icmp_signed("<", start, stop), body, after)
        b.position_at_end(body)
        loop = Loop(b.phi(_I64), [b.phi(value.type) for value in carried])
        yield loop
        last, following = b.block, b.add(loop.index, _int(step))
        b.cbranch(b.icmp_signed("<", following, stop), body, after)
        for phi, first, again in zip([loop.index, *loop.values], [start, *carried], [following, *loop.next]):
            phi.add_incoming(first, before)
            phi.add_incoming(again, last)
        b.position_at_end(after)
        for first, again in zip(carried, loop.next):
            phi = b.phi(first.type)
            phi.add_incoming(first, before)
            phi.add_incoming(again, last)
            loop.results.append(phi)

    def load(self, b: Any, kind: Any, pointer: Any, index: Any) -> Any:
        """`lanes` elements of memory."""
        vector = ir.VectorType(kind, self.lanes)
        loaded = b.load(b.bitcast(b.gep(pointer, [index]), vector.as_pointer()))
        loaded.align = {_I8: 1, _HALF: 2, _FLOAT: 4}[kind]
        return loaded

    def store(self, b: Any, vector: Any, pointer: Any, index: Any) -> None:
        b.store(vector, b.bitcast(b.gep(pointer, [index]), self.floats.as_pointer())).align = 4

    def spread(self, b: Any, pointer: Any, index: Any) -> Any:
        """One float in every lane."""
        undefined = ir.Constant(self.floats, ir.Undefined)
        one = b.insert_element(undefined, b.load(b.gep(pointer, [index])), ir.Constant(_I32, 0))
        return b.shuffle_vector(one, undefined, ir.Constant(self.ints, [0] * self.lanes))

    def fma(self, b: Any, x: Any, y: Any, z: Any) -> Any:
        return b.call(self._fma, [x, y, z])

    # Weights

    def scales(self, b: Any, scales: Any, zeros: Any) -> list[tuple[Any, Any]]:
        """(scale, shift) of every vector of a block, so that a weight is scale * code + shift. An fp16 scale times a
        zero of 8 bits is exact in fp32, and so is the weight, which is then rounded once."""
        found = []
        for part in self.parts:
            scale = b.fpext(self.load(b, _HALF, scales, part), self.floats)
            zero = b.uitofp(b.zext(self.load(b, _I8, zeros, part), self.ints), self.floats)
            found.append((scale, b.fneg(b.fmul(zero, scale))))
        return found

    def decoded(self, b: Any, codes: Any, index: Any, scales: list[tuple[Any, Any]]) -> list[list[Any]]:
        """The weights [input][vector] of the inputs that share a byte, from input `index` on."""
        row = b.mul(b.udiv(index, _int(self.per_byte)), _int(COLUMNS))
        ahead = b.gep(codes, [b.add(row, _int(AHEAD))])
        b.call(self._prefetch, [ahead, *(ir.Constant(_I32, n) for n in (0, 3, 1))])  # to read, to stay, data
        raw = [b.zext(self.load(b, _I8, codes, b.add(row, part)), self.ints) for part in self.parts]
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
        types = [t.as_pointer() for t in (_I8, _HALF, _I8, _FLOAT)] + [_I64] * 2
        made, b = self.function("decode", types)
        codes, scales, zeros, w, start, end = made.args
        known = self.scales(b, scales, zeros)
        with self.loop(b, start, end, self.per_byte) as k:
            for place, weights in enumerate(self.decoded(b, codes, k.index, known)):
                row = b.mul(b.add(b.sub(k.index, start), _int(place)), _int(COLUMNS))
                for part, weight in zip(self.parts, weights):
                    self.store(b, weight, w, b.add(row, part))
        b.ret_void()
        return made

    # Products

    def tile(self, rows: int, fused: bool) -> Any:
        """tile(x, x_stride, out, out_stride, start, end, ...): out [rows, COLUMNS] += x [rows, start:end] @ w, of a
        block's `w` as it was staged, or its `codes, scales, zeros`."""
        weights = (_I8, _HALF, _I8) if fused else (_FLOAT,)
        types = [_FLOAT.as_pointer(), _I64, _FLOAT.as_pointer(), _I64, _I64, _I64, *(t.as_pointer() for t in weights)]
        made, b = self.function(f"{'fused' if fused else 'tile'}_{rows}", types)
        x, x_stride, out, out_stride, start, end, *source = made.args
        known = self.scales(b, *source[1:]) if fused else []
        places = [b.add(b.mul(_int(row), out_stride), part) for row in range(rows) for part in self.parts]
        sums = [self.load(b, _FLOAT, out, place) for place in places]
        with self.loop(b, start, end, self.per_byte, sums) as k:
            sums = list(k.values)
            decoded = self.decoded(b, source[0], k.index, known) if fused else []
            for place in range(self.per_byte):
                index = b.add(k.index, _int(place))
                if not fused:
                    row = b.mul(b.sub(index, start), _int(COLUMNS))
                    decoded.append([self.load(b, _FLOAT, source[0], b.add(row, part)) for part in self.parts])
                for row in range(rows):
                    one = self.spread(b, x, b.add(b.mul(_int(row), x_stride), index))
                    for j, weight in enumerate(decoded[place]):
                        which = row * len(self.parts) + j
                        sums[which] = self.fma(b, one, weight, sums[which])
            k.next = sums
        for at, total in zip(places, k.results):
            self.store(b, total, out, at)
        b.ret_void()
        return made

    def entry(self) -> None:
        """quantized_product(arguments): takes panels until none is left; for any number of threads at once."""
        decode = self.staging()
        fused = [self.tile(rows, True) for rows in range(1, FUSED + 1)]
        tiles = [self.tile(rows, False) for rows in range(1, self.tile_rows + 1)]
        made = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [_I64.as_pointer()]), ENTRY)
        b = ir.IRBuilder(made.append_basic_block("entry"))
        given = {name: b.gep(made.args[0], [_int(i)]) for i, name in enumerate(ARGUMENTS)}
        following = given.pop("next")
        value = {name: b.load(pointer) for name, pointer in given.items()}
        kinds = {"x": _FLOAT, "codes": _I8, "scales": _HALF, "zeros": _I8, "out": _FLOAT, "ends": _I32}
        at = {name: b.inttoptr(value[name], kind.as_pointer()) for name, kind in kinds.items()}
        rows, inputs, columns = value["rows"], value["inputs"], b.mul(value["blocks"], _int(COLUMNS))
        code_bytes = b.mul(b.udiv(inputs, _int(self.per_byte)), _int(COLUMNS))
        buffer = b.bitcast(b.alloca(ir.ArrayType(_FLOAT, PANEL * SPAN * COLUMNS)), _FLOAT.as_pointer())
        few = b.icmp_signed("<=", rows, _int(FUSED))

        take, work, done = (b.append_basic_block(name) for name in ("take", "work", "done"))
        b.branch(take)
        b.position_at_end(take)
        first = b.mul(b.atomic_rmw("add", following, _int(1), "monotonic"), _int(PANEL))
        b.cbranch(b.icmp_signed("<", first, value["blocks"]), work, done)
        b.position_at_end(done)
        b.ret_void()
        b.position_at_end(work)
        end = b.add(first, _int(PANEL))
        end = b.select(b.icmp_signed("<", end, value["blocks"]), end, value["blocks"])

        def each_block(action: Callable[[Any], None]) -> None:
            with self.loop(b, first, end, 1) as block:
                action(block.index)

        def result(row: Any, block: Any) -> Any:
            return b.gep(at["out"], [b.add(b.mul(row, columns), b.mul(block, _int(COLUMNS)))])

        def clear(row: Any, block: Any) -> None:
            for part in self.parts:
                self.store(b, ir.Constant(self.floats, [0.0] * self.lanes), result(row, block), part)

        with self.loop(b, _int(0), rows, 1) as row:
            each_block(lambda block: clear(row.index, block))
        with self.loop(b, _int(0), value["spans"], 1, [_int(0)]) as span:
            (start,) = span.values
            stop, group = (
                b.sext(b.load(b.gep(at["ends"], [b.add(b.mul(span.index, _int(2)), _int(i))])), _I64) for i in (0, 1)
            )
            span.next = [stop]

            def coded(block: Any) -> list[Any]:
                """A block's codes, and its scales and zeros of the span."""
                known = b.mul(b.add(b.mul(block, value["groups"]), group), _int(COLUMNS))
                codes = b.gep(at["codes"], [b.mul(block, code_bytes)])
                return [codes, b.gep(at["scales"], [known]), b.gep(at["zeros"], [known])]

            def staged(block: Any) -> Any:
                return b.gep(buffer, [b.mul(b.sub(block, first), _int(SPAN * COLUMNS))])

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
                        with b.if_then(b.icmp_signed("==", rows, _int(count))):
                            multiply(function, _int(0), coded)
                with otherwise:
                    each_block(lambda block: b.call(decode, [*coded(block), staged(block), start, stop]))
                    whole = b.sub(rows, b.srem(rows, _int(self.tile_rows)))
                    with self.loop(b, _int(0), whole, self.tile_rows) as row:
                        multiply(tiles[-1], row.index, lambda block: [staged(block)])
                    for count, function in enumerate(tiles[:-1], 1):
                        with b.if_then(b.icmp_signed("==", b.sub(rows, whole), _int(count))):
                            multiply(function, whole, lambda block: [staged(block)])
        b.branch(take)


@dataclass
class Loop:
    """A loop that is being written."""

    index: Any
    values: list[Any]
    """What an iteration was handed."""
    next: list[Any] = field(default_factory=list)
    """What it hands to the next one; to be set in the body."""
    results: list[Any] = field(default_factory=list)
    """What the last one handed over, once the loop has ended."""


def module(bits: int, lanes: int) -> str:
    """The program as LLVM's text."""
    writer = Writer(bits, lanes)
    writer.entry()
    return str(writer.module)
