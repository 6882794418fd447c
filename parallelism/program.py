"""`Program`: the one truth. One device's graph with its collectives, read by planner, executor, resharder, report.

It is the same on every rank: what differs between ranks are the results of `offset`, a function of the rank that
the executor (or the simulation) evaluates. It saves as JSON and compares by `fingerprint`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import fx
from tpshard.parallelism import words
from tpshard.parallelism.graph import ANYWHERE, Place, Role
from tpshard.parallelism.mesh import Axes, Axis, Mesh
from tpshard.parallelism.sharding import Layout, local_shape
from tpshard.parallelism.why import Explanation, Need

T = TypeVar("T")
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
    why: tuple[Need, ...] = ()
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


@dataclass(frozen=True)
class ValueRecord:
    """What became of one named value of the global graph."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    annotated: bool
    """An axis of it was told for the value itself."""
    role: Role = ""
    label: str = ""
    """What the model, or the step, calls it: of a parameter in any form its name, of an activation and its gradient the
    activation's, of an input its own."""


def offset(axes: Axes, strides: tuple[int, ...]) -> int:
    """Sum of the rank's position along each axis times its stride; a node of the program, evaluated where the rank is
    known."""
    raise RuntimeError("a program's offsets are evaluated by the executor or the simulation, which know the rank")


@dataclass
class Program:
    """One device's graph and what it means globally.

    `graph` is an FX graph whose collectives are `_c10d_functional` ops on groups named by `group_name`; every node
    carries an `Info`. Passes are functions from a Program to a Program.
    """

    mesh: Mesh
    graph: fx.Graph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    records: dict[str, ValueRecord] = field(default_factory=dict)
    donated: dict[int, int] = field(default_factory=dict)
    """output index -> input index whose storage it takes over."""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    in_tree: Any = None
    out_tree: Any = None
    explanation: Callable[[str], Explanation] | None = None
    """Why a value of `records` is sharded as it is; None where that is not known, as for a program that was read."""
    _derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def derived(self, key: Any, make: Callable[[], T]) -> T:
        """What `make()` finds out about the program, made once for a key.

        A program does not change once the pass that makes it has returned it: passes work on a copy of their own.
        """
        if key not in self._derived:
            self._derived[key] = make()
        found: T = self._derived[key]
        return found

    # ---- what other programs read -------------------------------------------------------------------------
    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.graph.nodes)

    def issues(self) -> Iterator[tuple[fx.Node, Collective]]:
        """Nodes that issue a collective, in issue order."""
        for node in self.graph.nodes:
            found = node.meta.get(INFO)
            if found is not None and found.comm is not None:
                yield node, found.comm

    @property
    def collectives(self) -> list[Collective]:
        return [comm for _, comm in self.issues()]

    @property
    def in_shardings(self) -> list[tuple[Any, ...]]:
        return [public(port.layout, self.mesh) for port in self.inputs]

    @property
    def out_shardings(self) -> list[tuple[Any, ...]]:
        return [public(port.layout, self.mesh) for port in self.outputs]

    def sharding_of(self, name: str) -> tuple[Any, ...]:
        """Per dim None, an axis, or a tuple of axes. KeyError names what there is."""
        return public(self._record(name).layout, self.mesh)

    def explain(self, name: str) -> str:
        """Why a value is sharded as it is: a line per step, the last one the annotation."""
        record = self._record(name)
        lines = words.explanation(self.explained(name))
        return "\n".join([f"{name} {list(record.shape)}: {record.layout.show(self.mesh)}", *(f"  {s}" for s in lines)])

    def explained(self, name: str) -> Explanation:
        """The same as values."""
        return self.explanation(name) if self.explanation is not None else Explanation()

    def _record(self, name: str) -> ValueRecord:
        if name not in self.records:
            near = [known for known in self.records if name in known][:8]
            raise KeyError(f"no value is named {name!r}" + (f"; similar: {', '.join(near)}" if near else ""))
        return self.records[name]

    def local(self, rank: int, *global_args: Any) -> list[torch.Tensor]:
        """Device `rank`'s arguments, flattened, of the given global ones."""
        from tpshard.parallelism.simulate import local_arguments

        return local_arguments(self, rank, global_args)

    def simulate(self, *global_args: Any) -> list[torch.Tensor]:
        """Runs the graph of every device in this process, in lock-step, and returns the global results."""
        from tpshard.parallelism.simulate import simulate

        return simulate(self, global_args)

    @property
    def flop_efficiency(self) -> float:
        """Global FLOPs / (devices x FLOPs of one device), forward and backward without recomputation."""
        whole = local = 0
        for node in self.graph.nodes:
            known = node.meta.get(INFO)
            if known is not None and known.phase != "recompute":
                whole, local = whole + known.global_flops, local + known.flops
        return whole / (self.mesh.ranks * local) if local else 1.0

    # ---- comparing and saving -----------------------------------------------------------------------------
    def to_json(self, *, why: bool = True) -> dict[str, Any]:
        """Everything as plain data: nodes, ports, records. Same program, same bytes; without `why` no reasons, which
        say where in which file something stands."""
        return {
            "mesh": self.mesh.axes,
            "inputs": [_port_json(p, self.mesh) for p in self.inputs],
            "outputs": [_port_json(p, self.mesh) for p in self.outputs],
            "donated": {str(k): v for k, v in sorted(self.donated.items())},
            "nodes": [_node_json(node, why) for node in self.graph.nodes],
        }

    @property
    def fingerprint(self) -> str:
        """sha256 of `to_json` without its reasons: equal on all ranks, or they would hang."""
        return hashlib.sha256(json.dumps(self.to_json(why=False), sort_keys=True).encode()).hexdigest()

    def replace_graph(self, graph: fx.Graph) -> Program:
        return replace(self, graph=graph)


def public(layout: Layout, mesh: Mesh) -> tuple[Any, ...]:
    """A layout in the public form: None, an axis, or a tuple of axes per dim."""

    def one(axis: Axis) -> Any:
        return axis.name if axis.size == mesh.axes[axis.name] else tuple(axis)

    return tuple(None if not dim else one(dim[0]) if len(dim) == 1 else tuple(map(one, dim)) for dim in layout.dims)


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


def _port_json(port: Port, mesh: Mesh) -> dict[str, Any]:
    shape = ["*" if dim in port.free else size for dim, size in enumerate(port.shape)]
    held = {} if port.held is None else {"held": asdict(port.held)}
    return {
        "name": port.name, "shape": shape, "dtype": str(port.dtype), "kind": port.kind,
        "sharding": port.layout.show(mesh), **held,
    }  # fmt: skip


def _node_json(node: fx.Node, why: bool) -> dict[str, Any]:
    def plain(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return {"node": arg.name}
        if isinstance(arg, (list, tuple)):
            return [plain(a) for a in arg]
        if isinstance(arg, dict):
            return {k: plain(v) for k, v in arg.items()}
        return arg if isinstance(arg, (int, float, bool, str, type(None))) else str(arg)

    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    if isinstance(node.target, torch._ops.OpOverload):
        target = str(node.target)
    out = {"name": node.name, "op": node.op, "target": target, "args": plain(node.args), "kwargs": plain(node.kwargs)}
    known = node.meta.get(INFO)
    if known is not None:
        comm = None if known.comm is None else {k: plain(v) for k, v in vars(known.comm).items() if k != "why"}
        if comm is not None and why:
            comm["why"] = [plain(asdict(need)) for need in known.comm.why]
        out["info"] = {
            "specs": [[list(s.shape), str(s.dtype)] for s in known.specs], "module": known.module,
            "phase": known.phase, "flops": known.flops, "global_flops": known.global_flops, "comm": comm,
        }  # fmt: skip
    return out
