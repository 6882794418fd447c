"""Entries of the op table: the facts about an op that do not depend on its operands.

Facts that depend on a call's operands (factors, FLOPs, which sums may stay partial) are in the `Rule` that the entry's
`rule` builds for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.rule import Rule, whole

Builder = Callable[[Op], Rule]
Shape = tuple[int, ...]
Strides = Callable[[tuple[Any, ...], Shape, Shape, Shape], Shape | None]
"""A function (arguments, operand's shape, operand's strides, result's shape) -> result's strides; None for a copy."""
Work = Literal["matmul", "attention", "attention_backward", "stream", "free"]
"""The kind of an op's kernel: bound by arithmetic, or by memory ("stream"); "free" for ops without a kernel."""
Recorded = Literal["itself", "decomposed", "operand", "answered"] | Callable[..., Any]


@dataclass(frozen=True)
class Entry:
    """The facts about one op: its rule, and what capture, passes and the cost model do with it."""

    rule: Builder = whole
    """Builds the rule of one call."""

    # ---- how a graph holds it: record, canonical ----
    recorded: Recorded = "itself"
    """How the op is recorded. "decomposed": as torch's decomposition, if that shards better; a function: as the ops
    that it calls; "operand": as its operand; "answered": not at all, since tracing answers it."""
    canonical: Callable[[Op], None] | None = None
    """A function that rewrites the op in place to a synonym, such as `t` to `permute`; None if it stays."""
    equation: str = ""
    """The equation of a product, `mk,kn->mn`. Graphs hold it as a `contract` over all dims that views have merged."""
    random: bool = False
    """Whether the result depends on a random generator, and so on the device."""

    # ---- its result: flow, absorb, executor ----
    view: Strides | None = None
    """The strides of a result that shares the first operand's storage; None for other ops."""
    empty: bool = False
    """Whether its rule holds for calls with a tensor of no elements too, as some of embedding_bag's are."""
    commutes: bool = False
    """Whether the op commutes with a permutation along any dim that passes through it."""
    carries: int | None = None
    """The operand (attention's values) whose permutation along the last dim permutes the result alike; else None."""
    heads_dim: int = 2
    """The dim of that operand's heads."""
    mixes: int | None = None
    """The operand, such as an order of columns, because of which the op needs a dim whole; None for other ops."""
    broadcasts: bool = False
    """Whether the result is larger than its operand only by repetition."""

    dense: Literal["", "last", "all", "exactly"] = ""
    """The dims of its operands that must be contiguous, because its kernels require it. Torch's layers ensure that
    before they call such an op, but a device's shards may be laid out otherwise. "exactly": all dims, those of size 1
    included, whose strides torch otherwise ignores."""

    # ---- its cost: fusion, recomputation ----
    work: Work = "stream"
    """Products and attention are separate kernels; streams between them fuse."""
    adds: bool = False
    """Whether it adds a product of its other operands to the first."""
    inlined: bool = False
    """Whether a compiler computes an element of the result where it is read, instead of writing it."""
    routed: int = 0
    """How many of its last operands are experts' matrices. The operands before them are tokens and their routing, which
    travel to the devices that hold the experts. 0 for other ops."""
    lookup: bool = False
    """Whether it reads no more of its operands than it returns."""
    overwrites: bool = False
    """Whether it overwrites a part of its first operand, as large as its last, and reads nothing else of it."""
    exponentials: int = 0
    """Exponentials per element of the result."""
    cached: tuple[int, ...] = ()
    """Operands that are a cache with a free number of blocks: FLOPs and bytes read are those of one block."""
    listed: int | None = None
    """The operand [batch, rows, count] with the positions of the cache that each row reads; None: it reads all."""
    packed: bool = False
    """Whether its second operand is a weight in a layout of its own (see `cost.Cpu.products`)."""
    scratch: Callable[[Sequence[Sequence[int]]], int] | None = None
    """Bytes that its kernel on a GPU takes while it runs, by the shapes of a device's operands; None: none."""
    calls: int = 1
    """Library operations that it issues one after the other on a CPU, without views; a GPU has one kernel for them."""
    unpacks: bool = False
    """Whether its result is a larger form of a parameter, which no pass saves for the backward pass."""
    saved: bool = False
    """Whether it is expensive to recompute, so that selective recomputation keeps it."""


Table = dict[Any, Entry]
"""Entries by op (all overloads), one overload, a function, or a qualified name that avoids an import."""

decomposed = Entry(recorded="decomposed")
operand = Entry(recorded="operand")
answered = Entry(recorded="answered")
random = Entry(random=True)
