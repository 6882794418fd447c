"""The rule of one op call, which describes it by factors like an einsum.

Propagation projects shardings onto factors and back, the partitioner chooses one sharding of the factors and computes
locally, and the cost model reads FLOPs and bytes from the same factors. (Shardy: `sdy.op_sharding_rule`.)
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
"""The factors of one dim, major to minor."""


class Kind(Enum):
    PASS = "pass"
    """Sharding it only divides the work."""
    REDUCE = "reduce"
    """Summed: results without it are partial if it is sharded."""
    WHOLE = "whole"
    """The computation needs the whole dim (sort, cumulative sum)."""
    PERMUTE = "permute"
    """Elements move along it (slice, pad, roll, a convolution's window): a device needs its neighbours' elements, as
    the rule's windows say, or the whole dim without windows."""


@dataclass(frozen=True)
class Window:
    """The positions that one tensor reads of another along a dim: position `o` of the reader reads `span` positions
    from `stride * o + first` on. Tensors are numbered: operands, then results."""

    read: int
    dim: int
    reader: int
    reader_dim: int
    first: int = 0
    stride: int = 1
    span: int = 1
    fill: float | None = None
    """The value of positions that do not exist; None: what is read there is not used."""
    cyclic: bool = False
    """Whether the first position follows the last."""
    scale: int = 1
    """Positions of the reader that count as one."""


@dataclass(frozen=True)
class Exchange:
    """What a rule's own `local` gathers if a factor is sharded."""

    factor: int
    bytes: int
    """Bytes that every device contributes if nothing else is sharded; for a rotation, of all devices together."""
    collectives: int
    rotating: bool = False
    """Whether it moves around a ring hop by hop, while devices compute with what they have."""


@dataclass(frozen=True)
class Rule:
    """The factors of every operand and result dim of one op."""

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: tuple[int, ...]
    kinds: tuple[Kind, ...]
    reduction: str = "sum"
    """How partial results are combined: sum, max or min."""
    additive: tuple[int, ...] = ()
    """Operands in which the op is jointly linear: if all of them are partial sums, so is the result."""
    flops: int = 0
    """FLOPs of the whole op; a device does its share by the factors in `work`."""
    work: tuple[int, ...] = ()
    """The factors whose sharding divides the work."""
    local: Callable[[LocalOp], Any] | None = None
    """Emits the op on one device's shards; None: the same op on the local operands."""
    has_rule: bool = True
    """False for an op without a rule, whose dims are all whole."""
    priority: int = 2
    """0: pass-through ops (pointwise, views), propagated first; 2: all others."""
    even: bool = False
    """Whether it cannot handle padding, so that its factors are divided evenly or not at all."""
    fills: tuple[tuple[int, float], ...] = ()
    """(operand, value that its padding must hold): lookup indices, divisors."""
    guarded: tuple[int, ...] = ()
    """Summed factors whose padding the rule's own `local` does not read."""
    windows: tuple[tuple[int, Window], ...] = ()
    """(factor, window): how tensors read others along factors of kind PERMUTE, or along windowed sums."""
    mirrored: tuple[int, ...] = ()
    """Factors that are read in reverse."""
    exchanged: tuple[Exchange, ...] = ()
    """The communication inside of `local`."""
    others: tuple[Rule, ...] = ()
    """Other ways to compute the op on shards; the partitioner chooses the cheapest."""

    def fill(self, operand: int, factor: int) -> float | None:
        """The value that an operand's padding must hold along a factor; None if any will do.

        Padding along a factor that passes stays padding. Along a reduced factor it must be the neutral element.
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
    """The interface that a rule's `local` receives: one op on one device, with the factors' axes chosen."""

    op: Op
    inputs: list[Any]
    """Nodes of the operands' local shards."""

    def emit(self, target: Any, *args: Any, shape: Sequence[int], dtype: Any = None, **kwargs: Any) -> Any:
        """Adds a node; `shape` is its local shape."""

    def axes(self, factor: int) -> Axes:
        """The axes that shard a factor."""

    def size(self, factor: int) -> int:
        """A factor's local size."""

    def position(self, factor: int) -> Any:
        """A node (or 0) with this device's position along a factor's axes."""

    def several(
        self, target: Any, *args: Any, like: Sequence[tuple[Sequence[int], Any]], work: float | None = None
    ) -> list[Any]:
        """Adds a node with several results of these local shapes and dtypes; returns a node for each.

        work: the share of the op's FLOPs that it does, if several nodes share them."""

    def members(self, factor: int) -> int:
        """The number of devices along a factor's axes."""

    def pick(self, factor: int, table: Sequence[int]) -> Any:
        """A node with the table's entry for this device's position along a factor's axes."""

    def shifted(self, node: Any, factor: int) -> Any:
        """The value of the previous device along a factor's axes, cyclically."""

    def dtype(self, result: int) -> Any:
        """Dtype of a result."""

    def gathered(self, node: Any, factor: int) -> Any:
        """The values of all devices along a factor's axes in order, along a new first dim."""

    def shape_of(self, node: Any) -> tuple[int, ...]: ...

    def dtype_of(self, node: Any) -> Any: ...

    def shape(self, result: int = 0) -> tuple[int, ...]:
        """Local shape of a result."""

    def operand_shape(self, operand: int) -> tuple[int, ...]: ...

    def offset(self, factor: int) -> Any:
        """A node (or 0) with this device's first global index along a factor."""

    def valid(self, factor: int) -> Any:
        """A node (or number) with the number of indices of this device's shard that are not padding."""

    def first(self, factor: int) -> Any:
        """A node (or 1) that is 1 on the first device along a factor's axes and 0 on the others."""

    def window(self, operand: int, reader: int | None = None) -> Any:
        """A node with the part of an operand that this device reads for its shard of the reader (the first result); the
        operand itself if no window is sharded."""

    def fold(self, node: Any, read: int, reader: int) -> Any:
        """The transpose of `window`: sums what all windows' gradients add to this device's shard."""

    def begin(self, factor: int, read: int) -> Any:
        """A node (or 0) with the position of a tensor at which this device's window along a factor begins."""

    def mirror(self, operand: int) -> Any:
        """A node with this device's shard of the operand, flipped along the sharded mirrored factors."""

    def same(self, **kwargs: Any) -> Any:
        """The same op on the local shards, with updated keyword arguments."""

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
        """One factor per dim; for dims of size 1 only if `ones` is set.

        An op in which every dim passes also passes these: a slice of one row may be on the device that has it."""
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
    """The rule with every dim whole: correct for any op, sharded for none."""
    factors = Factors()
    operands = [factors.dims(v.shape, Kind.WHOLE) for v in op.operands]
    results = [factors.dims(v.shape, Kind.WHOLE) for v in op.results]
    return factors.rule(operands, results, has_rule=False)


def product(sizes: Sequence[int]) -> int:
    return math.prod(sizes)
