"""What programs for LLVM are written with: functions, loops, vectors of floats.

`b` is everywhere the place (an `ir.IRBuilder`) at which instructions are being written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llvmlite import ir

I8, I16, I32, I64, HALF, FLOAT = (*(ir.IntType(n) for n in (8, 16, 32, 64)), ir.HalfType(), ir.FloatType())
_BYTES = {I8: 1, I16: 2, HALF: 2, FLOAT: 4}


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
        self._fma = self.intrinsic("fma", 3)

    def intrinsic(self, name: str, operands: int) -> Any:
        """An operation of LLVM's on vectors of floats."""
        kind = ir.FunctionType(self.floats, [self.floats] * operands)
        return ir.Function(self.module, kind, f"llvm.{name}.v{self.lanes}f32")

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
        """One float in every lane."""
        undefined = ir.Constant(self.floats, ir.Undefined)
        one = b.insert_element(undefined, b.load(b.gep(pointer, [index])), ir.Constant(I32, 0))
        return b.shuffle_vector(one, undefined, ir.Constant(self.ints, [0] * self.lanes))

    def fma(self, b: Any, x: Any, y: Any, z: Any) -> Any:
        return b.call(self._fma, [x, y, z])

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
