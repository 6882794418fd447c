"""The sharding rule of one op call: the factors of each tensor's dims, like the letters of an einsum.

Propagation projects shardings onto factors and back, the partitioner chooses one sharding of the factors and computes
locally, and the cost model reads FLOPs and bytes from the same factors. (Shardy: `sdy.op_sharding_rule`.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntFlag
from typing import Any, Literal, Protocol

from tpshard.parallelism.graph import Op
from tpshard.parallelism.mesh import Axes

Dim = tuple[int, ...]
"""The factors of one dim, major to minor."""


class Kind(Enum):
    """What sharding a factor means for the computation of an op."""

    PASS = "pass"
    """Sharding it only divides the work."""
    REDUCE = "reduce"
    """The op sums over it: results without it are partial if it is sharded."""
    WHOLE = "whole"
    """The computation needs the whole dim (sort, cumulative sum)."""
    PERMUTE = "permute"
    """Elements move along it (slice, pad, roll, a convolution's window): a device needs its neighbours' elements, as
    the rule's windows say, or the whole dim without windows."""


class Direction(IntFlag):
    """The directions in which an op propagates a factor's axes."""

    NONE = 0
    BACKWARD = 1
    FORWARD = 2
    BOTH = 3


@dataclass(frozen=True)
class Window:
    """The positions that one tensor reads of another along a dim.

    Position `o` of the reader reads `span` positions from `stride * o + first` on. Tensors are numbered, the operands
    before the results.
    """

    read: int
    dim: int
    reader: int
    reader_dim: int
    first: int = 0
    stride: int = 1
    span: int = 1
    fill: float | None = None
    """The value of positions outside of the tensor; None if they are not used."""
    within: tuple[int, int] | None = None
    """The positions of the reader, from the first to the one behind the last, that read this; None: all. Of a rule that
    only moves elements."""
    mirrored: bool = False
    """Whether position `o` of the reader reads position `o` from the end, which is all that such a window may do: the
    rule flips what it gets."""
    scale: int = 1
    """The number of the reader's positions for one position of the window. Of a rule that only moves elements: position
    `o` reads position `(o + first) / scale` where that is whole, and the rule puts what it gets in these places."""
    places: tuple[int, ...] = ()
    """The first position that each position of the reader reads, ascending, instead of `stride * o + first`."""

    def begin(self, position: int) -> int:
        """The first position that one of the reader reads; behind the end of `places`, what the last one reads."""
        if self.places:
            return self.places[min(position, len(self.places) - 1)]
        return position * self.stride + self.first

    def length(self, size: int, written: int, members: int) -> int:
        """The length of the window of `written` positions of the reader, which has `size` over `members` devices."""
        if not self.places:
            return (written - 1) * self.stride + self.span
        parts = ((r * written, min((r + 1) * written, size) - 1) for r in range(members) if r * written < size)
        return max(self.begin(last) - self.begin(first) for first, last in parts) + self.span


@dataclass(frozen=True)
class Exchange:
    """The communication in a rule's own `local` if a factor is sharded."""

    factor: int
    bytes: int
    """Bytes that every device contributes to a gather if nothing else is sharded; else of all devices together."""
    collectives: int
    way: Literal["gather", "ring", "swap"] = "gather"
    """How: a ring moves shards from device to device, hop by hop, while each computes with its current one; a swap
    sends every shard to one other device."""


@dataclass(frozen=True)
class Rule:
    """The factors of every dim of one op's operands and results, and how it is computed on shards."""

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: tuple[int, ...]
    kinds: tuple[Kind, ...]
    reduction: str = "sum"
    """How partial results are combined: sum, product, max or min."""
    additive: tuple[int, ...] = ()
    """Operands in which the op is jointly linear: if all of them are partial sums, so is the result."""
    flops: int = 0
    """FLOPs of the whole op; a device does its share by the factors in `work`."""
    work: tuple[int, ...] = ()
    """The factors whose sharding divides the work."""
    uneven: tuple[int, ...] = ()
    """The factors in `work` whose shards differ in work, as those of a causal mask's queries: of n devices the last has
    (2n - 1) / n times the mean, and the others wait for it."""
    local: Callable[[LocalOp], Any] | None = None
    """Emits the op on one device's shards; None: the same op on the local operands."""
    has_rule: bool = True
    """False for an op without a rule, whose dims are all whole."""
    priority: int = 2
    """0: pass-through ops (pointwise, views), propagated first; 2: all others."""
    direction: Direction = Direction.BOTH
    """The directions in which it propagates at all; a barrier propagates in one or none."""
    blocked: tuple[int, ...] = ()
    """Factors that it does not propagate, because a sharding that suits one tensor would not suit another."""
    even: bool = False
    """Whether it cannot handle padding, so that its factors are divided evenly or not at all."""
    trailing: tuple[int, ...] = ()
    """Factors whose padding must all lie behind the last element."""
    fills: tuple[tuple[int, float], ...] = ()
    """Pairs (operand, the value that its padding must hold), as for lookup indices and divisors."""
    guarded: tuple[int, ...] = ()
    """Summed factors whose padding the rule's own `local` does not read."""
    windows: tuple[tuple[int, Window], ...] = ()
    """Pairs (factor, window): how tensors read others along factors of kind PERMUTE, or along windowed sums."""
    moving: bool = False
    """Whether the windows only move elements of the operands to the results, so that all are exchanged at once."""
    exchanged: tuple[Exchange, ...] = ()
    """The communication inside of `local`."""
    others: tuple[Rule, ...] = ()
    """Other ways to compute the op on shards; the partitioner chooses the cheapest."""

    def fill(self, operand: int, factor: int) -> float | None:
        """The value that an operand's padding along a factor must hold; None if any value will do.

        Padding along a factor that passes stays padding. Along a reduced factor it must be the neutral element.
        """
        for index, value in self.fills:
            if index == operand:
                return value
        if self.kinds[factor] is not Kind.REDUCE or factor in self.guarded:
            return None
        return {"sum": 0.0, "product": 1.0, "max": -math.inf, "min": math.inf}[self.reduction]

    @property
    def tensors(self) -> tuple[tuple[Dim, ...], ...]:
        return self.operands + self.results


class LocalOp(Protocol):
    """The interface that a rule's `local` receives: one op on one device, with the factors' axes chosen."""

    op: Op
    inputs: list[Any]
    """Nodes of the operands' local shards."""

    def emit(self, target: Any, *args: Any, work: bool = False, **kwargs: Any) -> Any:
        """Adds a node, whose local shape and dtype torch infers. work: whether it does the op's FLOPs."""

    def axes(self, factor: int) -> Axes:
        """The axes that shard a factor."""

    def size(self, factor: int) -> int:
        """The size of a factor on one device."""

    def position(self, factor: int) -> Any:
        """A node (or 0) with this device's position along a factor's axes."""

    def several(
        self, target: Any, *args: Any, work: float | None = None, busiest: float = 1.0, **kwargs: Any
    ) -> list[Any]:
        """Adds a node with several results; returns a node for each.

        work: the share of the op's FLOPs that it does, if several nodes share them. busiest: how many times a device's
        mean share the busiest device does, for which the others wait."""

    def members(self, factor: int) -> int:
        """The number of devices along a factor's axes."""

    def pick(self, factor: int, table: Sequence[int]) -> Any:
        """A node with the table's entry for this device's position along a factor's axes."""

    def send(self, node: Any, factor: int, to: Sequence[int]) -> Any:
        """What another device along a factor's axes sends of a node, that at position i to the one at to[i]."""

    def dtype(self, result: int) -> Any:
        """The dtype of a result."""

    def gather(self, node: Any, factor: int) -> Any:
        """The values of all devices along a factor's axes in order, along a new first dim."""

    def shape_of(self, node: Any) -> tuple[int, ...]:
        """The local shape of a node."""

    def dtype_of(self, node: Any) -> Any:
        """The dtype of a node."""

    def shape(self, result: int = 0) -> tuple[int, ...]:
        """The local shape of a result."""

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """The local shape of an operand."""

    def offset(self, factor: int) -> Any:
        """A node (or 0) with this device's first global index along a factor."""

    def valid(self, factor: int) -> Any:
        """A node (or number) with the number of indices of this device's shard that are not padding."""

    def first(self, factor: int) -> Any:
        """A node (or 1) that is 1 on the first device along a factor's axes and 0 on the others."""

    def window(self, operand: int, reader: int | None = None) -> Any:
        """A node with the part of an operand that this device reads; the operand itself if no window is sharded.

        reader: the tensor for whose shard it is read, by default the first result. With a rule that only moves
        elements, the reader's shard.
        """

    def fold(self, node: Any, read: int, reader: int) -> Any:
        """The transpose of `window`: sums the gradients of all windows that contain elements of this device's shard."""

    def begin(self, factor: int, read: int) -> Any:
        """A node (or 0) with the position of a tensor at which this device's window along a factor begins."""

    def same(self, **kwargs: Any) -> Any:
        """The same op on the local shards, with updated keyword arguments."""

    def with_args(self, *args: Any, **kwargs: Any) -> Any:
        """The same op with other arguments; a `Ref` in them stands for an operand."""


@dataclass
class Factors:
    """The factors of a rule that is being built."""

    sizes: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)

    def new(self, size: int, kind: Kind = Kind.PASS) -> int:
        """Adds a factor and returns its number."""
        self.sizes.append(size)
        self.kinds.append(kind)
        return len(self.sizes) - 1

    def dims(
        self, shape: Sequence[int], kind: Kind = Kind.PASS, only: Collection[int] | None = None, ones: bool = False
    ) -> tuple[Dim, ...]:
        """Adds a factor of a kind for each dim of a shape; for dims of size 1 only if `ones` is set.

        An op in which every dim passes also passes these: a slice of one row may be on the device that has it.
        only: the dims that are of this kind, while the others pass.
        """
        kinds = (kind if only is None or d in only else Kind.PASS for d in range(len(shape)))
        return tuple((self.new(n, kind),) if n != 1 or ones else () for n, kind in zip(shape, kinds))

    def rule(self, operands: Sequence[tuple[Dim, ...]], results: Sequence[tuple[Dim, ...]], **rest: Any) -> Rule:
        """The rule of these factors; by default, all results' factors and summed ones divide the work."""
        if "work" not in rest:
            of_results = {f for dims in results for dim in dims for f in dim}
            summed = {f for dims in operands for dim in dims for f in dim if self.kinds[f] is Kind.REDUCE}
            rest["work"] = tuple(sorted(of_results | summed))
        return Rule(tuple(operands), tuple(results), tuple(self.sizes), tuple(self.kinds), **rest)


def whole(op: Op) -> Rule:
    """The rule of an op without an entry: every dim is whole, which is correct for any op."""
    factors = Factors()
    operands = [factors.dims(v.shape, Kind.WHOLE) for v in op.operands]
    results = [factors.dims(v.shape, Kind.WHOLE) for v in op.results]
    return factors.rule(operands, results, has_rule=False)


def broadcast(shape: Sequence[int], out: Sequence[int], dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """The factors of an operand that broadcasts to the shape `out`, whose factors are `dims`."""
    lead = len(out) - len(shape)
    return tuple(dims[lead + d] if n == out[lead + d] else () for d, n in enumerate(shape))
