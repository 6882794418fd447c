"""What a step does to its rows between products, for a CPU, written for LLVM: a decoded token waits for every call of
torch, and in plain torch these are six calls, four and two.

    rms_norm   out [rows, width]      = x / sqrt(mean(x * x) + eps) * weight
    rotate     out [rows, heads, dim] = x * cos + roll(x, dim / 2) * sin
    gate       out [rows, width]      = silu(x) * up

All is fp32. Vectors have one width on every CPU and sums one order: a row's bits depend on nothing else.
"""

from __future__ import annotations

from typing import Any

from tpshard.kernels.llvm_writer import FLOAT, I32, Entry, Writer, integer

LANES, SUMS = 8, 4
STEP = LANES * SUMS
"""The width of a norm is a multiple of it; that of a gate is one of LANES, as is half of a head's dim."""
ARGUMENTS = {
    "rms_norm": ("x", "weight", "out", "rows", "width", "eps", "next"),
    "rotate": ("x", "cos", "sin", "out", "rows", "heads", "dim", "next"),
    "gate": ("x", "up", "out", "rows", "width", "next"),
}
"""The fields of each program; `eps` as the bits of a float."""
_POINTERS = ("x", "weight", "cos", "sin", "up", "out")


class RowsWriter(Writer):
    def __init__(self) -> None:
        super().__init__("rows", LANES)

    def program(self, name: str) -> None:
        arguments = ARGUMENTS[name]
        entry = self.entry(name, arguments, {field: FLOAT for field in arguments if field in _POINTERS})
        with self.tasks(entry, 1, entry.given["rows"]) as row:
            getattr(self, name)(entry, row)

    def rms_norm(self, entry: Entry, row: Any) -> None:
        b, width, at = entry.b, entry.given["width"], entry.at
        x, out = (b.gep(at[name], [b.mul(row, width)]) for name in ("x", "out"))
        with self.loop(b, integer(0), width, STEP, [self.constant(0.0)] * SUMS) as k:
            values = [self.load(b, FLOAT, x, b.add(k.index, integer(i * LANES))) for i in range(SUMS)]
            k.next = [self.fma(b, value, value, total) for value, total in zip(values, k.values)]
        first, second = (b.fadd(*k.results[i : i + 2]) for i in (0, 2))
        mean = b.fdiv(self.folded(b, b.fadd(first, second), b.fadd), b.sitofp(width, FLOAT))
        eps = b.bitcast(b.trunc(entry.given["eps"], I32), FLOAT)
        root = self.intrinsic(b, "sqrt", self.filled(b, b.fadd(mean, eps), self.floats))
        inverse = b.fdiv(self.constant(1.0), root)
        with self.loop(b, integer(0), width, LANES) as k:
            unit = b.fmul(self.load(b, FLOAT, x, k.index), inverse)
            self.store(b, b.fmul(unit, self.load(b, FLOAT, at["weight"], k.index)), out, k.index)

    def rotate(self, entry: Entry, row: Any) -> None:
        b, given, at = entry.b, entry.given, entry.at
        heads, dim = given["heads"], given["dim"]
        cos, sin = (b.gep(at[name], [b.mul(row, dim)]) for name in ("cos", "sin"))
        half = b.udiv(dim, integer(2))
        with self.loop(b, integer(0), heads, 1) as head:
            begin = b.mul(b.add(b.mul(row, heads), head.index), dim)
            x, out = (b.gep(at[name], [begin]) for name in ("x", "out"))
            with self.loop(b, integer(0), half, LANES) as k:
                places = [k.index, b.add(k.index, half)]
                values = [self.load(b, FLOAT, x, place) for place in places]
                for place, value, other in zip(places, values, reversed(values)):
                    kept = b.fmul(value, self.load(b, FLOAT, cos, place))
                    turned = b.fmul(other, self.load(b, FLOAT, sin, place))
                    self.store(b, b.fadd(kept, turned), out, place)

    def gate(self, entry: Entry, row: Any) -> None:
        """silu(x) = x / (1 + exp(-x)); of -|x|, whose exponential does not overflow, for both signs."""
        b, width, at = entry.b, entry.given["width"], entry.at
        x, up, out = (b.gep(at[name], [b.mul(row, width)]) for name in ("x", "up", "out"))
        zero, one = self.constant(0.0), self.constant(1.0)
        with self.loop(b, integer(0), width, LANES) as k:
            value = self.load(b, FLOAT, x, k.index)
            negative = b.fcmp_ordered("<", value, zero)
            power = self.exp(b, b.select(negative, value, b.fneg(value)))
            silu = b.fdiv(b.fmul(value, b.select(negative, power, one)), b.fadd(one, power))
            self.store(b, b.fmul(silu, self.load(b, FLOAT, up, k.index)), out, k.index)


def module(name: str) -> str:
    """One of the programs as LLVM's text."""
    writer = RowsWriter()
    writer.program(name)
    return str(writer.module)
