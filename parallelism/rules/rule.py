"""What a rule is: one call of an op described like an einsum, by factors.

Three readers: propagation projects shardings onto factors and back, the partitioner picks one sharding of the factors
and computes locally, the cost model reads FLOPs and bytes off the same factors. (Shardy: `sdy.op_sharding_rule`.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from tpshard.parallelism.graph import Op
from tpshard.parallelism.mesh import Axes

Dim = tuple[int, ...]
"""The factors that one dim is made of, major to minor."""


class Kind(Enum):
    PASS = "pass"
    """Sharding it shards the work, nothing else."""
    REDUCE = "reduce"
    """Summed over: results without it are partial where it is sharded."""
    WHOLE = "whole"
    """The computation needs the whole dim (sort, cumulative sum)."""
    PERMUTE = "permute"
    """Elements change places along it (slice, pad, roll, a convolution's window): a device needs its neighbours', as
    the rule's windows say; the whole dim where it has none."""


@dataclass(frozen=True)
class Window:
    """What one tensor of an op reads of another along a dim: position `o` of the reader reads the positions from
    `stride * o + first` on, `span` of them. Tensors are counted: operands, then results."""

    read: int
    dim: int
    reader: int
    reader_dim: int
    first: int = 0
    stride: int = 1
    span: int = 1
    fill: float | None = None
    """What positions that do not exist hold; None: what is read there is not used."""
    cyclic: bool = False
    """Whether the first position follows the last."""
    scale: int = 1
    """Positions of the reader that count as one."""


@dataclass(frozen=True)
class Exchange:
    """What a rule's own `local` gathers where a factor is cut."""

    factor: int
    bytes: int
    """That every device contributes, were nothing else cut; of what is rotated, of all devices together."""
    collectives: int
    rotating: bool = False
    """Whether it goes around a ring, a hop at a time, while devices compute with what they have."""


@dataclass(frozen=True)
class Rule:
    """Factors of every operand and result dim of one op."""

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: tuple[int, ...]
    kinds: tuple[Kind, ...]
    reduction: str = "sum"
    """How partial results combine: sum, max or min."""
    additive: tuple[int, ...] = ()
    """Operands in which the op is jointly linear: where all of them are partial sums, so is the result."""
    flops: int = 0
    """Of the whole op; a device does its share, by the factors in `work`."""
    work: tuple[int, ...] = ()
    """The factors that make up the work; sharding one of them divides it."""
    local: Callable[[LocalOp], Any] | None = None
    """Emits the op on one device's parts; None: the same op with the operands replaced."""
    known: bool = True
    """False for the rule of an op without one: everything whole."""
    priority: int = 2
    """0: pass-through ops (pointwise, views), propagated first; 2: the rest."""
    even: bool = False
    """Cannot compute with padding: its factors are cut evenly or not at all."""
    fills: tuple[tuple[int, float], ...] = ()
    """(operand, what its padding must hold): indices that are looked up, divisors."""
    guarded: tuple[int, ...] = ()
    """Summed factors whose padding the rule's own `local` does not read."""
    windows: tuple[tuple[int, Window], ...] = ()
    """(factor, window): how tensors read others along factors of kind PERMUTE, or of windowed sums."""
    mirrored: tuple[int, ...] = ()
    """Factors that are read from end to start."""
    exchanged: tuple[Exchange, ...] = ()
    """What `local` gathers by itself."""
    others: tuple[Rule, ...] = ()
    """Other ways to compute the op in parts; the partitioner takes the cheapest."""

    def fill(self, operand: int, factor: int) -> float | None:
        """What the padding of an operand must hold along a factor; None where anything is right.

        Padding along a factor that passes stays padding. Along one that is summed (or maximized, minimized) it must be
        neutral.
        """
        for index, value in self.fills:
            if index == operand:
                return value
        if self.kinds[factor] is not Kind.REDUCE or factor in self.guarded:
            return None
        return {"sum": 0.0, "max": -math.inf, "min": math.inf}[self.reduction]

    @property
    def tensors(self) -> tuple[tuple[Dim, ...], ...]:
        return self.operands + self.results


class LocalOp(Protocol):
    """What a rule's `local` sees: one op, on one device, with the factors' axes chosen."""

    op: Op
    inputs: list[Any]
    """Nodes of the operands' local parts."""

    def emit(self, target: Any, *args: Any, shape: Sequence[int], dtype: Any = None, **kwargs: Any) -> Any:
        """Adds a node; `shape` is its local shape."""

    def axes(self, factor: int) -> Axes:
        """The axes that shard a factor."""

    def size(self, factor: int) -> int:
        """A factor's local size."""

    def position(self, factor: int) -> Any:
        """Node (or 0) of this device's place along a factor's axes."""

    def several(
        self, target: Any, *args: Any, like: Sequence[tuple[Sequence[int], Any]], work: float | None = None
    ) -> list[Any]:
        """Adds a node with several results, of these local shapes and dtypes; returns a node for each.

        `work`: the part of the op's FLOPs that it does, where several nodes share them."""

    def members(self, factor: int) -> int:
        """Devices along a factor's axes."""

    def pick(self, factor: int, table: Sequence[int]) -> Any:
        """Node of the table's entry for this device's place along a factor's axes."""

    def shifted(self, node: Any, factor: int) -> Any:
        """What the device before this one along a factor's axes has; the first follows the last."""

    def dtype(self, result: int) -> Any:
        """Dtype of a result."""

    def gathered(self, node: Any, factor: int) -> Any:
        """What all devices along a factor's axes have, in their order, along a new first dim."""

    def shape_of(self, node: Any) -> tuple[int, ...]: ...

    def dtype_of(self, node: Any) -> Any: ...

    def shape(self, result: int = 0) -> tuple[int, ...]:
        """Local shape of a result."""

    def operand_shape(self, operand: int) -> tuple[int, ...]: ...

    def offset(self, factor: int) -> Any:
        """Node (or 0) of this device's first global index along a factor."""

    def valid(self, factor: int) -> Any:
        """Node (or number) of how many indices of this device's part of a factor are not padding."""

    def first(self, factor: int) -> Any:
        """Node (or 1) that is 1 on the first device along a factor's axes and 0 on the others."""

    def window(self, operand: int, reader: int | None = None) -> Any:
        """Node of what this device reads of an operand for its part of the reader (the first result); the operand
        where no window is cut."""

    def fold(self, node: Any, read: int, reader: int) -> Any:
        """Transpose of `window`: from what a part of the reader adds to its window, summed, this device's part."""

    def begin(self, factor: int, read: int) -> Any:
        """Node (or 0) of the position of a tensor at which this device's window along a factor begins."""

    def mirror(self, operand: int) -> Any:
        """Node of this device's part of the operand flipped along the mirrored factors that are cut."""

    def same(self, **kwargs: Any) -> Any:
        """The same op on the local parts, with its keyword arguments updated."""

    def with_args(self, *args: Any, **kwargs: Any) -> Any:
        """The same op with other arguments; a `Ref` in them stands for an operand."""


@dataclass
class Factors:
    """Collects factors while a rule is built."""

    sizes: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)

    def new(self, size: int, kind: Kind = Kind.PASS) -> int:
        self.sizes.append(size)
        self.kinds.append(kind)
        return len(self.sizes) - 1

    def dims(self, shape: Sequence[int], kind: Kind = Kind.PASS, ones: bool = False) -> tuple[Dim, ...]:
        """A factor of its own for each dim; for dims of size 1 only where `ones` is set: what passes every dim passes
        them too, when a slice of one row lies on the device that has it."""
        return tuple((self.new(n, kind),) if n != 1 or ones else () for n in shape)

    def rule(self, operands: Sequence[tuple[Dim, ...]], results: Sequence[tuple[Dim, ...]], **rest: Any) -> Rule:
        if "work" not in rest:
            rest["work"] = tuple(
                sorted(
                    {f for dims in results for dim in dims for f in dim}
                    | {f for dims in operands for dim in dims for f in dim if self.kinds[f] is Kind.REDUCE}
                )
            )
        if "flops" not in rest:
            rest["flops"] = 0
        return Rule(tuple(operands), tuple(results), tuple(self.sizes), tuple(self.kinds), **rest)


def whole(op: Op) -> Rule:
    """Every dim whole: right for any op, sharded for none."""
    factors = Factors()
    operands = [factors.dims(v.shape, Kind.WHOLE) for v in op.operands]
    results = [factors.dims(v.shape, Kind.WHOLE) for v in op.results]
    return factors.rule(operands, results, known=False)


def product(sizes: Sequence[int]) -> int:
    return math.prod(sizes)
