"""The `Program` class: one device's graph of ops and collectives, with the layouts of inputs and outputs.

It is the same on every rank: only the results of `offset` and similar functions of the rank differ, which the executor
or the simulation evaluates. It can be saved as JSON and compared by `fingerprint`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import fx
from tpshard.parallelism import simulate, texts, words
from tpshard.parallelism.graph import Role
from tpshard.parallelism.mesh import Axis, Mesh
from tpshard.parallelism.node_info import (
    INFO,
    Collective,
    Held,
    Info,
    Port,
    PortKey,
    Spec,
    group_name,
    info,
    make_collective,
    offset,
    parse_group,
    programs_in,
)
from tpshard.parallelism.sharding import Layout
from tpshard.parallelism.why import Explanation, ReasonLookup, explanation

if TYPE_CHECKING:
    from tpshard.parallelism.propagated import Shardings

T = TypeVar("T")


@dataclass(frozen=True)
class ValueRecord:
    """The layout and names of one named value of the global graph."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    annotated: bool
    """Whether one of its axes comes from an annotation of the value itself, not from propagation."""
    role: Role = ""
    label: str = ""
    """Its name in the model or the step: a parameter's in any form, an activation's also for its gradient."""
    dims: tuple[str, ...] = ()
    """Names of its dims, where they have any."""


class Collectives(list[Collective]):
    """A program's collectives in issue order, which print as a table with the reason of each."""

    def __str__(self) -> str:
        return texts.collectives_table(self)


@dataclass(repr=False)
class Program:
    """One device's program: its graph with the layouts of inputs, outputs and named values.

    `graph` is an FX graph whose collectives are `_c10d_functional` ops on groups named by `group_name`; every node has
    an `Info`. Passes are functions from a Program to a Program. A program prints as text (`parallelism.texts`).
    """

    mesh: Mesh
    graph: fx.Graph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    records: dict[str, ValueRecord] = field(default_factory=dict)
    donated: dict[int, int] = field(default_factory=dict)
    """For each donated output index, the index of the input whose storage it reuses."""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    in_tree: Any = None
    out_tree: Any = None
    reasons: ReasonLookup | None = None
    """The reasons of the shardings of `records`; None if they were not stored."""
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _unordered: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def cached(self, key: Any, make: Callable[[], T], *, in_any_order: bool = False) -> T:
        """The result of `make()`, a function of the program, cached under `key`.

        That is safe, because a program does not change after the pass that returned it: passes work on copies.
        in_any_order: whether the result stays valid when the nodes are reordered.
        """
        cache = self._unordered if in_any_order else self._cache
        if key not in cache:
            cache[key] = make()
        return cache[key]  # type: ignore[no-any-return]

    # ---- what other programs read -------------------------------------------------------------------------
    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.graph.nodes)

    def arguments(self, values: Mapping[PortKey, T]) -> list[T]:
        """The values of its inputs, in order, out of all values of a step. KeyError for one that is missing."""
        return [values[port.key] for port in self.inputs]

    def results(self, values: Sequence[T]) -> dict[PortKey, T]:
        """The values of its outputs by kind and name."""
        return {port.key: value for port, value in zip(self.outputs, values, strict=True)}

    def with_results(self, keys: Sequence[PortKey], *, overwrites: bool = False) -> Program:
        """The program whose outputs have these kinds and names. overwrites: whether the inputs of the same kind and
        name are donated to them."""
        feeds = {port.key: i for i, port in enumerate(self.inputs)}
        ports = [replace(port, kind=kind, name=name) for port, (kind, name) in zip(self.outputs, keys, strict=True)]
        donated = {i: feeds[key] for i, key in enumerate(keys) if overwrites and key in feeds}
        return replace(self, outputs=tuple(ports), donated=donated)

    def issues(self) -> Iterator[tuple[fx.Node, Collective]]:
        """Yields the nodes that issue collectives, with these, in issue order."""
        for node in self.graph.nodes:
            info = node.meta.get(INFO)
            if info is not None and info.comm is not None:
                yield node, info.comm

    @property
    def useful_flops(self) -> int:
        """Floating-point operations of all devices together, without recomputation."""
        infos = (node.meta.get(INFO) for node in self.nodes)
        return sum(each.global_flops for each in infos if each is not None and each.phase != "recompute")

    @property
    def collectives(self) -> Collectives:
        """Its collectives in issue order; those of a body of control flow once, however often it runs."""
        return Collectives(self._every_collective())

    def _every_collective(self) -> Iterator[Collective]:
        for node in self.graph.nodes:
            for body in programs_in(node):
                yield from body.collectives
            if (comm := node.meta[INFO].comm if INFO in node.meta else None) is not None:
                yield comm

    @property
    def shardings(self) -> Shardings | None:
        """The shardings of the captured graph that it was partitioned from; None if they were not stored. Of a deep
        model's equal layers they are those of a few."""
        return getattr(self.reasons, "propagated", None)

    def text(self, stage: str = "partition", of: texts.Of | None = None) -> str:
        """The program as text, as `print` shows it, or at an earlier stage: its captured `graph`, or its `shardings`.

        of: selects operations and values by the names of modules and values.
        """
        if stage == "partition":
            return texts.program_text(self, of)
        shardings, depth = self.shardings, getattr(self.reasons, "depth", None)
        if shardings is None or stage not in ("graph", "shardings"):
            raise ValueError(f"the program has no stage {stage!r}: it has graph, shardings (unless read) and partition")
        text = (
            texts.graph_text(shardings.graph, of, depth)
            if stage == "graph"
            else texts.shardings_text(shardings, of, depth)
        )
        return f"{depth.note}\n{text}" if depth is not None and text else text

    def __str__(self) -> str:
        return self.text()

    @property
    def in_shardings(self) -> list[tuple[Any, ...]]:
        return [public(port.layout, self.mesh) for port in self.inputs]

    @property
    def out_shardings(self) -> list[tuple[Any, ...]]:
        return [public(port.layout, self.mesh) for port in self.outputs]

    def sharding_of(self, name: str) -> tuple[Any, ...]:
        """The sharding of a value: per dim None, an axis, or a tuple of axes. Raises KeyError with similar names."""
        return public(self._record(name).layout, self.mesh)

    def explain(self, name: str) -> str:
        """Why a value has its sharding, as text: a line per step, the last one the annotation."""
        record = self._record(name)
        lines = words.explanation(self.explanation_of(name))
        size = "x".join(map(str, record.shape))
        head = f"{name}{record.layout.notation(self.mesh, record.dims)}  {size}".rstrip()
        return "\n".join([head, *(f"  {line}" for line in lines)])

    def explanation_of(self, name: str) -> Explanation:
        """Why a value has its sharding, as data."""
        return Explanation() if self.reasons is None else explanation(self.reasons, self.mesh, name)

    def _record(self, name: str) -> ValueRecord:
        if name not in self.records:
            near = [candidate for candidate in self.records if name in candidate][:8]
            raise KeyError(f"no value is named {name!r}" + (f"; similar: {', '.join(near)}" if near else ""))
        return self.records[name]

    def local(self, rank: int, *global_args: Any, seed: int | torch.Tensor | None = None) -> list[torch.Tensor]:
        """Cuts global arguments into the shards of device `rank`; returns them flattened.

        seed: for a program that draws random numbers, the same on every rank, and a new one for each step. Default: the
        last `torch.manual_seed` in this process. Raises ValueError in a multi-process run without a seed, since other
        processes may have another default.
        """
        return simulate.local_arguments(self, rank, global_args, seed)

    def simulate(self, *global_args: Any, seed: int | torch.Tensor | None = None) -> list[torch.Tensor]:
        """Runs the graph of every device in this process, in lock-step, and returns the global results.

        `seed` as for `local`: the same seed draws the same numbers.
        """
        return simulate.simulate(self, global_args, seed)

    @property
    def flop_efficiency(self) -> float:
        """Global FLOPs / (devices x FLOPs of one device), forward and backward without recomputation."""
        infos = (node.meta.get(INFO) for node in self.nodes)
        local = sum(each.flops for each in infos if each is not None and each.phase != "recompute")
        return self.useful_flops / (self.mesh.ranks * local) if local else 1.0

    # ---- comparing and saving -----------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        """The program as plain data: mesh, ports and nodes. The same program gives the same bytes.

        Collectives have no reasons there, since these contain file positions.
        """
        constants = {name: _constant_json(tensor) for name, tensor in sorted(self.constants.items())}
        return {
            "mesh": self.mesh.axes,
            "inputs": [_port_json(p, self.mesh) for p in self.inputs],
            "outputs": [_port_json(p, self.mesh) for p in self.outputs],
            "donated": {str(k): v for k, v in sorted(self.donated.items())},
            "nodes": [_node_json(node) for node in self.graph.nodes],
            **({"constants": constants} if constants else {}),
        }

    @property
    def fingerprint(self) -> str:
        """The sha256 of `to_json`. Ranks with different fingerprints would hang."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def replace_graph(self, graph: fx.Graph) -> Program:
        """The same program with `graph` as its graph."""
        return replace(self, graph=graph)

    def with_new_order(self) -> Program:
        """A new program after a pass that only reordered nodes, with the cached results that no order affects."""
        program = self.replace_graph(self.graph)
        program._unordered.update(self._unordered)
        return program


def public(layout: Layout, mesh: Mesh) -> tuple[Any, ...]:
    """A layout in the public form: per dim None, an axis, or a tuple of axes."""

    def one(axis: Axis) -> Any:
        return axis.name if axis.size == mesh.axes[axis.name] else tuple(axis)

    return tuple(None if not dim else one(dim[0]) if len(dim) == 1 else tuple(map(one, dim)) for dim in layout.dims)


def _port_json(port: Port, mesh: Mesh) -> dict[str, Any]:
    shape = ["*" if dim in port.free else size for dim, size in enumerate(port.shape)]
    held = {} if port.held is None else {"held": _held_json(port.held, mesh)}
    return {
        "name": port.name, "shape": shape, "dtype": str(port.dtype), "kind": port.kind,
        "sharding": port.layout.show(mesh), **held,
    }  # fmt: skip


def _held_json(held: Held, mesh: Mesh) -> dict[str, Any]:
    plain = {"form": held.form, "bytes": held.bytes, "of": held.of}
    return plain | ({"shardings": [layout.show(mesh) for layout in held.layouts]} if held.layouts else {})


def _constant_json(tensor: torch.Tensor) -> dict[str, Any]:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    hashed = hashlib.sha256(values).hexdigest()
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "sha256": hashed}


def _node_json(node: fx.Node) -> dict[str, Any]:
    def plain(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return {"node": arg.name}
        if isinstance(arg, (list, tuple)):
            return [plain(a) for a in arg]
        if isinstance(arg, dict):
            return {k: plain(v) for k, v in arg.items()}
        if isinstance(arg, Program):
            return arg.to_json()
        return arg if isinstance(arg, (int, float, bool, str, type(None))) else str(arg)

    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    if isinstance(node.target, torch._ops.OpOverload):
        target = str(node.target)
    out = {"name": node.name, "op": node.op, "target": target, "args": plain(node.args), "kwargs": plain(node.kwargs)}
    info = node.meta.get(INFO)
    if info is not None:
        comm = None if info.comm is None else {k: plain(v) for k, v in vars(info.comm).items() if k != "why"}
        out["info"] = {
            "specs": [[list(s.shape), str(s.dtype)] for s in info.specs], "module": info.module,
            "phase": info.phase, "flops": info.flops, "global_flops": info.global_flops, "comm": comm,
        }  # fmt: skip
    return out


__all__ = [
    "INFO", "Collective", "Held", "Info", "Port", "PortKey", "Program", "Spec", "ValueRecord", "group_name", "info",
    "make_collective", "offset", "parse_group", "public",
]  # fmt: skip
