"""What programs for LLVM are written with: functions, loops, vectors of floats.

`b` is everywhere the place (an `ir.IRBuilder`) at which instructions are being written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llvmlite import ir

I8, I16, I32, I64, HALF, FLOAT = (*(ir.IntType(n) for n in (8, 16, 32, 64)), ir.HalfType(), ir.FloatType())
_BYTES = {I8: 1, I16: 2, HALF: 2, FLOAT: 4}


# exp(x) = 2**n * exp(r), n whole and |r| <= ln(2) / 2: ln(2) in two parts, and a polynomial (those of Cephes' expf)
_LOG2_E, _LN_2 = 1.44269504088896341, (0.693359375, -2.12194440e-4)
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LEAST = -87.0
"""Below it exp is taken for 0."""


def integer(value: int) -> Any:
    return ir.Constant(I64, value)


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


class Writer:
    """Writes the functions of one module, with vectors of `lanes` floats."""

    def __init__(self, name: str, lanes: int) -> None:
        self.module, self.lanes = ir.Module(name), lanes
        self.floats, self.ints = ir.VectorType(FLOAT, lanes), ir.VectorType(I32, lanes)

    def intrinsic(self, b: Any, name: str, *operands: Any) -> Any:
        """An operation of LLVM's on vectors of floats of any length."""
        kind, name = operands[0].type, f"llvm.{name}.v{operands[0].type.count}f32"
        known = self.module.globals.get(name)
        return b.call(known or ir.Function(self.module, ir.FunctionType(kind, [kind] * len(operands)), name), operands)

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
        loop = Loop(b.phi(I64), [b.phi(value.type) for value in carried])
        yield loop
        last, following = b.block, b.add(loop.index, integer(step))
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
        loaded.align = _BYTES[kind]
        return loaded

    def store(self, b: Any, vector: Any, pointer: Any, index: Any) -> None:
        b.store(vector, b.bitcast(b.gep(pointer, [index]), self.floats.as_pointer())).align = 4

    def spread(self, b: Any, pointer: Any, index: Any) -> Any:
        """One float of memory in every lane."""
        return self.filled(b, b.load(b.gep(pointer, [index])), self.floats)

    def filled(self, b: Any, value: Any, kind: Any) -> Any:
        """A vector with one value in every place."""
        one = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        return self.picked(b, one, [0] * kind.count)

    def picked(self, b: Any, vector: Any, places: Iterable[int], following: Any = None) -> Any:
        """The elements at these places of a vector, or of two, one after the other."""
        mask = list(places)
        following = vector if following is None else following
        return b.shuffle_vector(vector, following, ir.Constant(ir.VectorType(I32, len(mask)), mask))

    def folded(self, b: Any, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
        """All lanes joined, halves first."""
        size = self.lanes
        while size > 1:
            size //= 2
            vector = join(*(self.picked(b, vector, range(first, first + size)) for first in (0, size)))
        return b.extract_element(vector, ir.Constant(I32, 0))

    def whole(self, b: Any, pointer: Any, kind: Any, count: int) -> Any:
        """`count` elements of memory, wherever they begin."""
        loaded = b.load(b.bitcast(pointer, ir.VectorType(kind, count).as_pointer()))
        loaded.align = 1
        return loaded

    def keep(self, b: Any, vector: Any, pointer: Any) -> None:
        """Stores a vector of any type, wherever it begins."""
        b.store(vector, b.bitcast(pointer, vector.type.as_pointer())).align = 1

    def room(self, b: Any, kind: Any, count: int) -> Any:
        """Memory of the function that is being written, on a line of the cache."""
        made = b.alloca(ir.ArrayType(kind, count))
        made.align = 64
        return b.bitcast(made, kind.as_pointer())

    def smaller(self, b: Any, value: Any, most: int) -> Any:
        return b.select(b.icmp_signed("<", value, integer(most)), value, integer(most))

    def by_count(self, b: Any, count: Any, functions: Sequence[Any], arguments: Sequence[Any]) -> None:
        """Calls the function for this count, the first of them for 1."""
        for n, function in enumerate(functions, 1):
            with b.if_then(b.icmp_signed("==", count, integer(n))):
                b.call(function, arguments)

    def fma(self, b: Any, x: Any, y: Any, z: Any) -> Any:
        return self.intrinsic(b, "fma", x, y, z)

    def exp(self, b: Any, x: Any) -> Any:
        """For x up to 0, and NaN."""
        far = b.fcmp_ordered("<", x, self.constant(_LEAST))
        x = b.select(far, self.constant(_LEAST), x)
        n = self.intrinsic(b, "rint", b.fmul(x, self.constant(_LOG2_E)))
        r = self.fma(b, n, self.constant(-_LN_2[0]), x)
        r = self.fma(b, n, self.constant(-_LN_2[1]), r)
        y = self.constant(_POLYNOMIAL[0])
        for factor in _POLYNOMIAL[1:]:
            y = self.fma(b, y, r, self.constant(factor))
        y = b.fadd(self.fma(b, y, b.fmul(r, r), r), self.constant(1.0))
        exponent = b.add(b.fptosi(n, self.ints), ir.Constant(self.ints, [127] * self.lanes))
        power = b.bitcast(b.shl(exponent, ir.Constant(self.ints, [23] * self.lanes)), self.floats)
        return b.select(far, self.constant(0.0), b.fmul(y, power))

    def constant(self, value: float) -> Any:
        return ir.Constant(self.floats, [value] * self.lanes)

    def entry(self, name: str, arguments: Sequence[str], pointers: dict[str, Any]) -> Entry:
        """name(arguments): the function that others call, with a pointer to 64-bit fields; the last one, `next`, is
        the task that is next to be taken, by however many threads are in the function at once."""
        made = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [I64.as_pointer()]), name)
        b = ir.IRBuilder(made.append_basic_block("entry"))
        places = {name: b.gep(made.args[0], [integer(i)]) for i, name in enumerate(arguments)}
        following = places.pop("next")
        given = {name: b.load(place) for name, place in places.items()}
        at = {name: b.inttoptr(given[name], kind.as_pointer()) for name, kind in pointers.items()}
        return Entry(b, following, given, at)

    @contextmanager
    def tasks(self, entry: Entry, step: int, count: Any) -> Iterator[Any]:
        """Takes `step` tasks at a time, and hands the first of them to the body, until all `count` are taken. The
        function ends with it."""
        b = entry.b
        take, work, done = (b.append_basic_block(name) for name in ("take", "work", "done"))
        b.branch(take)
        b.position_at_end(take)
        first = b.mul(b.atomic_rmw("add", entry.next, integer(1), "monotonic"), integer(step))
        b.cbranch(b.icmp_signed("<", first, count), work, done)
        b.position_at_end(done)
        b.ret_void()
        b.position_at_end(work)
        yield first
        b.branch(take)


@dataclass
class Entry:
    """The beginning of a function that others call: its fields by name, and those that are addresses as pointers."""

    b: Any
    next: Any
    given: dict[str, Any]
    at: dict[str, Any]
