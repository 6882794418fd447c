"""What is known of an op wherever it is called: one line of the table.

What depends on the operands of a call (factors, FLOPs, which sums may stay partial) is in the `Rule` that the entry's
`rule` makes for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.rule import Rule, whole

Builder = Callable[[Op], Rule]
Shape = tuple[int, ...]
Strides = Callable[[tuple[Any, ...], Shape, Shape, Shape], Shape | None]
"""(arguments, operand's shape, operand's strides, result's shape) -> result's strides; None where it has to copy."""
Work = Literal["matmul", "attention", "attention_backward", "stream", "free"]
"""What bounds the kernel of an op: arithmetic, or memory ("stream"); "free": there is no kernel."""
Recorded = Literal["itself", "decomposed", "operand", "answered"] | Callable[..., Any]


@dataclass(frozen=True)
class Entry:
    """The facts of one op."""

    rule: Builder = whole
    """Its factors, for one call."""

    # ---- how a graph holds it: record, canonical ----
    recorded: Recorded = "itself"
    """"decomposed": as the ops that torch decomposes it into, where these shard better, or a function: as what that
    calls; "operand": as what it reads; "answered": a question about a tensor, which tracing answers."""
    canonical: Callable[[Op], None] | None = None
    """Rewrites the op, in place, to the form in which graphs hold it."""
    equation: str = ""
    """Of a product: `mk,kn->mn`. Graphs hold it as a `contract` over all dims that views have merged."""
    random: bool = False
    """Its result depends on a generator, so on the device."""

    # ---- what its result is: flow, absorb, executor ----
    view: Strides | None = None
    """The result lies in the first operand's storage: its strides there."""
    commutes: bool = False
    """A permutation along a dim that the op passes may come before it or after it."""
    carries: int | None = None
    """The operand whose positions in the last dim are the result's."""
    mixes: int | None = None
    """The operand for whose sake the dims are whole that otherwise would pass."""
    broadcasts: bool = False
    """Its result is larger than its operand only because it repeats it."""

    dense: Literal["", "last", "all"] = ""
    """The dims of its operands that must lie densely: its kernels read them so. torch's own layers see to that before
    they call such an op; on a device it gets parts, which may lie otherwise."""

    # ---- what it costs: fusion, recomputation ----
    work: Work = "stream"
    """Products and attention are kernels of their own; streams between them fuse."""
    inlined: bool = False
    """A compiler computes an element of the result where it is read, rather than writing it."""
    lookup: bool = False
    """It reads no more of its operands than it returns."""
    exponentials: int = 0
    """For each element of the result."""
    cached: tuple[int, ...] = ()
    """Operands that are a cache of as many blocks as there are: FLOPs, and what is read of them, are of one."""
    saved: bool = False
    """Dear to make again: selective recomputation keeps it."""


Table = dict[Any, Entry]
"""By op (all overloads), one overload, function, or qualified name where its room need not be imported."""

decomposed = Entry(recorded="decomposed")
operand = Entry(recorded="operand")
answered = Entry(recorded="answered")
random = Entry(random=True)
