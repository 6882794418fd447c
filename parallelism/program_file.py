"""Saves programs as JSON, alone or inside other plain values, and loads them.

`Program.to_json` describes a program for people and for its fingerprint. This format holds everything: the types of
arguments, constants, and the reasons of shardings. `dump` returns {"pool": [...], "value": ...}. The pool stores equal
values once, and other values refer to them by index. Numbers, strings, booleans and null are themselves; every other
value is a list that begins with its kind: `["tuple", ...]`, `["op", "aten.mm.default"]`, `["node", "mm_3"]`,
`["pool", 7]`.
"""

from __future__ import annotations

import importlib
import marshal
import math
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from tpshard.kernels.dtypes import dtype_name
from tpshard.parallelism.graph import Layer, Place
from tpshard.parallelism.mesh import Axis, Mesh
from tpshard.parallelism.node_info import INFO, Collective, Held, Info, Port, Spec
from tpshard.parallelism.program import Program, ValueRecord
from tpshard.parallelism.rules import table  # noqa: F401  whose import registers our operations
from tpshard.parallelism.sharding import Layout
from tpshard.parallelism.why import Demand, LastStep, ShardingReason, SourcePlace, Through

CLASSES = (
    Axis, Collective, Demand, Held, Info, LastStep, Layer, Layout, Place, Port, ShardingReason, SourcePlace, Spec,
    Through, ValueRecord,
)  # fmt: skip
"""The classes in a program: frozen dataclasses and named tuples, stored as their fields in order."""

OPS = ("aten", "prims", "_c10d_functional", "tpshard")
"""Namespaces of operations that a file may name."""

MODULES = ("_operator", "tpshard.parallelism", "tpshard.kernels")
"""Modules that a file may name functions of; those of their submodules too."""


def dump(value: Any, classes: Iterable[type] = ()) -> dict[str, Any]:
    """Converts a value to JSON: programs and their parts, instances of `classes`, and tuples, lists and maps of these.

    Raises TypeError for anything else.
    """
    writer = _Writer({*CLASSES, *classes})
    encoded = writer.encode(value)
    return {"pool": writer.pool, "value": encoded}


def load(data: dict[str, Any], classes: Iterable[type] = ()) -> Any:
    """Reads JSON that `dump` wrote with the same `classes`. Raises ValueError for data of another form."""
    try:
        reader = _Reader({cls.__name__: cls for cls in (*CLASSES, *classes)}, data["pool"])
        return reader.decode(data["value"])
    except (LookupError, TypeError, AttributeError, RecursionError, RuntimeError, ImportError) as error:
        raise ValueError(f"not a stored program: {type(error).__name__}: {error}") from error


def _is_allowed(module: str) -> bool:
    """Whether a file may name the functions of a module."""
    return any(module == allowed or module.startswith(f"{allowed}.") for allowed in MODULES)


class _Writer:
    """Converts values to JSON, and collects the pool."""

    def __init__(self, classes: set[type]) -> None:
        self.classes = classes
        self.pool: list[Any] = []
        self.number: dict[bytes, int] = {}
        """The index in the pool of each value, by its JSON in bytes."""
        self.references: dict[int, tuple[Any, list[Any]]] = {}
        """The reference to each pooled object, by `id`, and the object, kept alive so that no other gets its `id`."""

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else ["float", repr(value)]
        if kind in self.classes:
            return self.add_once(value, lambda: [kind.__name__, *map(self.encode, _values(value))])
        if isinstance(value, fx.Node):
            return ["node", value.name]
        if kind in (tuple, torch.Size):
            return ["tuple", *map(self.encode, value)]
        if isinstance(value, list):
            return ["list", *map(self.encode, value)]
        if isinstance(value, dict):
            return ["map", *([self.encode(key), self.encode(item)] for key, item in value.items())]
        if isinstance(value, frozenset):
            return ["set", *map(self.encode, sorted(value))]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if isinstance(value, slice):
            return ["slice", *map(self.encode, (value.start, value.stop, value.step))]
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return ["torch", str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, torch.Tensor):
            return ["tensor", dtype_name(value.dtype), list(value.shape), value.flatten().tolist()]
        if isinstance(value, pytree.TreeSpec):
            return ["tree", pytree.treespec_dumps(value)]
        if isinstance(value, torch._ops.OpOverload):
            return ["op", str(value)]
        if isinstance(value, Mesh):
            return ["mesh", [[name, size] for name, size in value.axes.items()]]
        if isinstance(value, Program):
            return ["program", *self.program(value)]
        if callable(value) and _is_allowed(value.__module__):
            return ["function", value.__module__, value.__qualname__]
        raise TypeError(f"a {kind.__name__} cannot be stored")

    def add_once(self, value: Any, make: Callable[[], Any]) -> list[Any]:
        """Adds `make()`, the JSON of `value`, to the pool unless it is there, and returns a reference to it."""
        if id(value) not in self.references:
            encoded = make()
            number = self.number.setdefault(marshal.dumps(encoded, 2), len(self.pool))
            if number == len(self.pool):
                self.pool.append(encoded)
            self.references[id(value)] = value, ["pool", number]
        return self.references[id(value)][1]

    def program(self, program: Program) -> list[Any]:
        why = program.reasons

        def reasons() -> Any:
            return None if why is None else self.encode({name: why(name) for name in program.records})

        ports = program.mesh, program.inputs, program.outputs, program.donated, program.constants, program.warnings
        return [
            [self.node(node) for node in program.graph.nodes],
            *map(self.encode, ports),
            self.add_once(program.records, lambda: self.encode(program.records)),
            self.encode(program.in_tree),
            self.encode(program.out_tree),
            None if why is None else self.add_once(why, reasons),
        ]

    def node(self, node: fx.Node) -> list[Any]:
        kwargs = self.encode(dict(node.kwargs)) if node.kwargs else None
        rest = map(self.encode, (node.target, node.args, node.meta.get(INFO)))
        return [node.name, node.op, *rest, kwargs]


class _Reader:
    """Converts JSON back to values; the method `_KIND` reads a list of that kind."""

    _float = staticmethod(float)
    _complex = staticmethod(complex)
    _device = staticmethod(torch.device)
    _tree = staticmethod(pytree.treespec_loads)

    def __init__(self, classes: dict[str, type], pool: list[Any]) -> None:
        self.classes, self.pool = classes, pool
        self.decoded: dict[int, Any] = {}
        self.nodes: dict[str, fx.Node] = {}

    def decode(self, data: Any) -> Any:
        if not isinstance(data, list):
            return data
        kind, *rest = data
        if kind in self.classes:
            return self.classes[kind](*map(self.decode, rest))
        read: Callable[..., Any] = getattr(self, f"_{kind}")
        return read(*rest)

    def _pool(self, number: int) -> Any:
        if number not in self.decoded:
            self.decoded[number] = self.decode(self.pool[number])
        return self.decoded[number]

    def _node(self, name: str) -> fx.Node:
        return self.nodes[name]

    def _tuple(self, *items: Any) -> tuple[Any, ...]:
        return tuple(map(self.decode, items))

    def _list(self, *items: Any) -> list[Any]:
        return list(map(self.decode, items))

    def _map(self, *pairs: Any) -> dict[Any, Any]:
        return {self.decode(key): self.decode(value) for key, value in pairs}

    def _set(self, *items: Any) -> frozenset[Any]:
        return frozenset(map(self.decode, items))

    def _slice(self, start: Any, stop: Any, step: Any) -> slice:
        return slice(*map(self.decode, (start, stop, step)))

    def _torch(self, name: str) -> Any:
        value = getattr(torch, name)
        if not isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            raise TypeError(f"torch.{name}")
        return value

    def _tensor(self, dtype: str, shape: list[int], values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=self._torch(dtype)).reshape(shape)

    def _op(self, name: str) -> Any:
        namespace, packet, overload = name.split(".")
        if namespace not in OPS:
            raise TypeError(f"operations of {namespace}")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)

    def _function(self, module: str, name: str) -> Any:
        if not _is_allowed(module):
            raise TypeError(f"functions of {module}")
        return getattr(importlib.import_module(module), name)

    def _mesh(self, axes: list[list[Any]]) -> Mesh:
        return Mesh([(name, size) for name, size in axes])

    def _program(
        self, nodes: list[Any], mesh: Any, inputs: Any, outputs: Any, donated: Any, constants: Any, warnings: Any,
        records: Any, in_tree: Any, out_tree: Any, why: Any,
    ) -> Program:  # fmt: skip
        graph = fx.Graph()
        self.nodes = {}
        for name, op, target, args, info, kwargs in nodes:
            keywords = {} if kwargs is None else self.decode(kwargs)
            node = graph.create_node(op, self.decode(target), self.decode(args), keywords, name=name)
            node.name = name
            if info is not None:
                node.meta[INFO] = self.decode(info)
            self.nodes[name] = node

        return Program(
            self.decode(mesh), graph, self.decode(inputs), self.decode(outputs), self.decode(records),
            self.decode(donated), self.decode(constants), self.decode(warnings), self.decode(in_tree),
            self.decode(out_tree), None if why is None else lambda name: self.decode(why)[name],
        )  # fmt: skip


def _values(value: Any) -> list[Any]:
    names = _fields(value.__class__)
    return list(value) if names is None else [getattr(value, name) for name in names]


@cache
def _fields(kind: Any) -> tuple[str, ...] | None:
    """The fields of a dataclass that its constructor takes; None for a tuple."""
    return tuple(field.name for field in fields(kind) if field.init) if is_dataclass(kind) else None
