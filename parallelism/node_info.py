"""What a program's nodes carry: results as a device holds them, where they come from, what they send; and its ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from tpshard.parallelism import words
from tpshard.parallelism.graph import ANYWHERE, Place, Role
from tpshard.parallelism.mesh import Axes, Axis, Mesh
from tpshard.parallelism.sharding import Layout, local_shape
from tpshard.parallelism.why import Demand

INFO = "tpshard"
"""Key of `Info` in a node's meta."""


@dataclass(frozen=True)
class Collective:
    """One collective of the program, as one device sees it.

    `bytes` is the buffer that the ring cost multiplies: an all-gather's output, a reduce-scatter's input, an
    all-reduce's tensor, what one device holds before an all-to-all, what it sends in a permute.
    """

    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all or permute; between stages of a pipeline send or recv."""
    axes: tuple[Any, ...]
    """Names of the axes it runs over; a sub-axis is (name, pre, size)."""
    refs: Axes
    """The same as (sub-)axes, in mesh order."""
    bytes: int
    dtype: str
    value: tuple[str, ...] = ()
    """Global values that it moves: several in a bucket."""
    of: Role = ""
    """parameter, gradient, logits, loss, scalar or activation: what is moved."""
    asked: bool = True
    """False for a reshard that nothing in the annotations asks for."""
    why: tuple[Demand, ...] = ()
    """Why it is there, for each value."""

    @property
    def reason(self) -> str:
        """Why it is there: the operation, the value, both layouts and the annotation behind them."""
        return words.reason(self.why)

    @property
    def members(self) -> int:
        """Values moved by it: more than one in a bucket."""
        return len(self.value)

    @property
    def size(self) -> int:
        """Devices in its group."""
        n = 1
        for axis in self.refs:
            n *= axis.size
        return n


@dataclass(frozen=True)
class Spec:
    """Shape (of one device's part) and dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def bytes(self) -> int:
        n = self.dtype.itemsize
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True)
class Info:
    """What a node of `Program.graph` knows of itself, in `node.meta[INFO]`; see `info(node)`."""

    specs: tuple[Spec, ...]
    """One for each result, as one device holds it."""
    origin: str = ""
    """Operation (or value) of the global graph it comes from."""
    place: Place = ANYWHERE
    """Where in the model and in the step."""
    flops: int = 0
    """Floating-point operations of one device."""
    global_flops: int = 0
    """Of the whole operation, all devices together; 0 for nodes that only move data."""
    comm: Collective | None = None
    """On the node that issues a collective; None on its wait."""
    unit: str = ""
    """FSDP unit of a gather or reduce-scatter."""
    saved: bool = False
    """Output of a matmul or attention: what selective recomputation keeps."""

    @property
    def module(self) -> str:
        return self.place.module

    @property
    def phase(self) -> str:
        return self.place.phase

    @cached_property
    def bytes(self) -> int:
        """Of all results, on one device."""
        return sum([spec.bytes for spec in self.specs])


def info(node: fx.Node) -> Info:
    return node.meta[INFO]


@dataclass(frozen=True)
class Held:
    """How a device holds an input that is no plain tensor to it."""

    form: str
    """What the kernels that read it call it."""
    bytes: int
    of: tuple[str, ...]
    """The parameters that it is made of, side by side."""


@dataclass(frozen=True)
class Port:
    """An input or output of the program."""

    name: str
    shape: tuple[int, ...]
    """Global shape."""
    dtype: torch.dtype
    layout: Layout
    kind: str = "tensor"
    """parameter, gradient, optimizer, batch, cache, order, scalar or tensor; in a stage of a pipeline also received,
    sent or saved."""
    free: tuple[int, ...] = ()
    """Dims whose size whoever runs the program chooses: blocks of a cache. `shape` says 1 there."""
    held: Held | None = None

    @property
    def local(self) -> tuple[int, ...]:
        return local_shape(self.shape, self.layout)

    @property
    def local_bytes(self) -> int:
        """What a device holds of it; of one that is free, a piece of size 1."""
        return Spec(self.local, self.dtype).bytes if self.held is None else self.held.bytes


def offset(axes: Axes, strides: tuple[int, ...]) -> int:
    """Sum of the rank's position along each axis times its stride; a node of the program, evaluated where the rank is
    known."""
    raise RuntimeError("a program's offsets are evaluated by the executor or the simulation, which know the rank")


def group_name(axes: Sequence[Axis]) -> str:
    """Name of the process group over `axes` in a graph: `fsdp`, `dp+fsdp`, `tp:(1)2`."""
    return "+".join(f"{a.name}:({a.pre}){a.size}" for a in axes)


def parse_group(name: str) -> Axes:
    """Inverse of `group_name`."""
    axes = []
    for part in name.split("+"):
        axis, _, tail = part.rpartition(":(")
        pre, _, size = tail.partition(")")
        axes.append(Axis(axis, int(pre), int(size)))
    return tuple(axes)


def make_collective(mesh: Mesh, kind: str, refs: Axes, nbytes: int, dtype: torch.dtype, **rest: Any) -> Collective:
    names = tuple(a.name if a.size == mesh.axes[a.name] else tuple(a) for a in refs)
    return Collective(kind, names, refs, nbytes, str(dtype).removeprefix("torch."), **rest)
