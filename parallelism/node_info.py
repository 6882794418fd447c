"""The metadata of a program's nodes (shapes, origin, collectives), and the program's ports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from tpshard.kernels.dtypes import dtype_name
from tpshard.parallelism import words
from tpshard.parallelism.graph import ANYWHERE, Place, Role
from tpshard.parallelism.mesh import Axes, Axis, Mesh, size_of
from tpshard.parallelism.rules.control_flow import CONTROL_FLOW
from tpshard.parallelism.sharding import Layout, local_shape
from tpshard.parallelism.why import Demand

PortKey = tuple[str, str]
"""The kind and the name of a port."""

INFO = "tpshard"
"""The key of `Info` in a node's meta."""


@dataclass(frozen=True)
class Collective:
    """One collective of the program, as one device runs it.

    bytes: the buffer that the ring cost multiplies: an all-gather's output, a reduce-scatter's input, an all-reduce's
    tensor, a device's shard before an all-to-all, what it sends in a permute.
    """

    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all or permute; between pipeline stages send or recv."""
    axes: tuple[Any, ...]
    """Names of its axes; a sub-axis is (name, pre, size)."""
    refs: Axes
    """Its (sub-)axes, in mesh order."""
    bytes: int
    dtype: str
    value: tuple[str, ...] = ()
    """The global values it moves: several in a bucket."""
    of: Role = ""
    """The role of these values: parameter, gradient, logits, loss, scalar or activation."""
    requested: bool = True
    """False for a reshard that no annotation asks for."""
    why: tuple[Demand, ...] = ()
    """The reasons, one per value."""

    @property
    def reason(self) -> str:
        """The reason as text: the operation, the value, both layouts and the annotation behind them."""
        return words.reason(self.why)

    @property
    def members(self) -> int:
        """The number of values that the collective moves: more than one in a bucket."""
        return len(self.value)

    @property
    def size(self) -> int:
        """The number of devices in the collective's group."""
        return size_of(self.refs)


@dataclass(frozen=True)
class Spec:
    """The shape and dtype of a value on one device."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def bytes(self) -> int:
        """Bytes of a device's tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Info:
    """The metadata of a node of `Program.graph`, in `node.meta[INFO]`; see `info(node)`."""

    specs: tuple[Spec, ...]
    """One per result, as one device holds it."""
    origin: str = ""
    """The operation (or value) of the global graph that it comes from."""
    place: Place = ANYWHERE
    """Its place in the model and in the step."""
    flops: int = 0
    """FLOPs of one device."""
    global_flops: int = 0
    """FLOPs of the whole operation on all devices; 0 for nodes that only move data."""
    comm: Collective | None = None
    """The collective, on the node that issues it; None on its wait."""
    unit: str = ""
    """The FSDP unit of a gather or reduce-scatter."""
    saved: bool = False
    """Whether it is an output of a matmul or attention, which selective recomputation keeps."""

    @property
    def module(self) -> str:
        return self.place.module

    @property
    def phase(self) -> str:
        return self.place.phase

    @cached_property
    def bytes(self) -> int:
        """Bytes of all results on one device."""
        return sum([spec.bytes for spec in self.specs])


def info(node: fx.Node) -> Info:
    """The metadata of a node that has some; `flow.info_of` accepts all nodes."""
    return node.meta[INFO]


def programs_in(node: fx.Node) -> list[Any]:
    """The programs that are bodies of a node's control flow; none of other nodes."""
    if node.target not in CONTROL_FLOW:
        return []
    return [arg for arg in node.args if not isinstance(arg, (int, fx.Node))]


def operand_shapes(node: fx.Node) -> list[tuple[int, ...]]:
    """The shapes of the operands of control flow, on one device; none of other nodes."""
    if node.target not in CONTROL_FLOW:
        return []
    return [shape_of(arg) for arg in node.args if isinstance(arg, fx.Node)]


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of a node's first result on one device."""
    return info(node).specs[0].shape


def resized(node: fx.Node, dim: int, size: int) -> tuple[int, ...]:
    """The shape of a node with another size of one dim."""
    shape = shape_of(node)
    return (*shape[:dim], size, *shape[dim + 1 :])


@dataclass(frozen=True)
class Held:
    """The form in which a device stores an input that is not a plain tensor, such as packed weights."""

    form: str
    """The name of the form in the kernels' room."""
    bytes: int
    of: tuple[str, ...]
    """The parameters that it holds, side by side."""
    layouts: tuple[Layout, ...] = ()
    """The layout of each of them, where not all have the port's."""


@dataclass(frozen=True)
class Port:
    """An input or output of the program."""

    name: str
    shape: tuple[int, ...]
    """Global shape."""
    dtype: torch.dtype
    layout: Layout
    kind: str = "tensor"
    """parameter, gradient, optimizer, batch, cache, state, order, scalar or tensor; in a pipeline stage also received,
    sent or saved."""
    free: tuple[int, ...] = ()
    """Dims whose size the executor chooses, such as the blocks of a cache; `shape` has 1 there."""
    held: Held | None = None

    @property
    def key(self) -> PortKey:
        """Its kind and name, by which programs of one step find their arguments among one another's results."""
        return self.kind, self.name

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of a device's shard."""
        return local_shape(self.shape, self.layout)

    @property
    def local_bytes(self) -> int:
        """Bytes of a device's shard; free dims count with size 1."""
        return Spec(self.local, self.dtype).bytes if self.held is None else self.held.bytes


def offset(axes: Axes, strides: tuple[int, ...]) -> int:
    """A number that depends on the rank: the sum of its position along each axis times that axis's stride.

    The function is a node's target; the executor and the simulation, which know the rank, evaluate it.
    """
    raise RuntimeError("a program's offsets are evaluated by the executor or the simulation, which know the rank")


def group_name(axes: Sequence[Axis]) -> str:
    """The name of the process group over `axes` in a graph: `fsdp`, `dp+fsdp`, `tp:(1)2`."""
    return "+".join(f"{a.name}:({a.pre}){a.size}" for a in axes)


def parse_group(name: str) -> Axes:
    """The axes of a group name, the inverse of `group_name`."""
    axes = []
    for part in name.split("+"):
        axis, _, tail = part.rpartition(":(")
        pre, _, size = tail.partition(")")
        axes.append(Axis(axis, int(pre), int(size)))
    return tuple(axes)


def make_collective(mesh: Mesh, kind: str, refs: Axes, nbytes: int, dtype: torch.dtype, **rest: Any) -> Collective:
    names = tuple(a.name if a.size == mesh.axes[a.name] else tuple(a) for a in refs)
    return Collective(kind, names, refs, nbytes, dtype_name(dtype), **rest)
