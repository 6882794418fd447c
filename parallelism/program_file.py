"""Saves programs as JSON, alone or inside other plain values, and loads them.

`Program.to_json` describes a program for people and for its fingerprint. This format holds everything: the types of
arguments, constants, and the reasons of shardings. `dump` returns {"pool": [...], "value": ...}. The pool stores equal
values once, and other values refer to them by index. Numbers, strings, booleans and null are themselves; every other
value is a list that begins with its kind: `["tuple", ...]`, `["node", "mm_3"]`, `["pool", 7]`.

A file may come from anybody, and an FX graph becomes Python code. So a node calls an operation of the rules' table or a
function in FUNCTIONS, by name; nothing else in a file names code, and every name that reaches the code of a graph is a
plain identifier.
"""

from __future__ import annotations

import builtins
import keyword
import marshal
import math
import operator
from collections.abc import Callable, Container, Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any

import torch
from torch import fx
from tpshard.kernels.dtypes import dtype_name
from tpshard.parallelism.graph import Layer, Place
from tpshard.parallelism.mesh import Axis, Mesh
from tpshard.parallelism.node_info import INFO, Collective, Held, Info, Port, Spec, offset
from tpshard.parallelism.program import Program, ValueRecord
from tpshard.parallelism.resharding.lower import is_first, pick, transfers, valid
from tpshard.parallelism.rules.control_flow import cond, scan, while_loop
from tpshard.parallelism.rules.table import OTHER, entry_of
from tpshard.parallelism.sharding import Layout
from tpshard.parallelism.transfer import copied, fetch, offload, recv, send
from tpshard.parallelism.why import Demand, LastStep, ShardingReason, SourcePlace, Through

CLASSES = (
    Axis, Collective, Demand, Held, Info, LastStep, Layer, Layout, Place, Port, ShardingReason, SourcePlace, Spec,
    Through, ValueRecord,
)  # fmt: skip
"""The classes in a program: frozen dataclasses and named tuples, stored as their fields in order."""

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem, "offset": offset, "transfers": transfers, "valid": valid, "pick": pick,
    "is_first": is_first, "send": send, "recv": recv, "offload": offload, "fetch": fetch, "copied": copied,
    "cond": cond, "scan": scan, "while_loop": while_loop,
}  # fmt: skip
"""The functions that a node may call, by their name in a file."""

BODIES = {cond: (2, 1), scan: (1, 3), while_loop: (2, 1)}
"""How many bodies, and then numbers, are the first arguments of control flow."""

OPS = ("aten", "prims", "_c10d_functional", "tpshard")
"""Namespaces of operations."""

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "wait_tensor")

_NAMES = {function: name for name, function in FUNCTIONS.items()}
_PLAIN = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
}
_TAKEN = {*dir(builtins), *keyword.kwlist, "torch", "device", "inf", "nan", "NoneType", "fx_pytree", "pytree", "self"}
"""Names with a meaning in the Python code of a graph."""
ARGUMENTS = (bool, int, float, complex, str, torch.device, torch.dtype, torch.layout, torch.memory_format)
"""The types of a node's arguments that are no node and hold none."""
_MOST_VALUES = 1_000_000_000
"""Values of a file, those in the pool counted as often as they are used."""


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
    except (LookupError, TypeError, AttributeError, RecursionError, RuntimeError, OverflowError) as error:
        raise ValueError(f"not a stored program: {type(error).__name__}: {error}") from error


def _is_allowed(op: torch._ops.OpOverload) -> bool:
    """Whether a node may call an operation: it has an entry in the rules' table, or is a collective."""
    if op.namespace == "_c10d_functional":
        return op._opname in COLLECTIVES
    return op.namespace in OPS and entry_of(op) is not OTHER


def _check_name(name: Any, reserved: Container[str] = _TAKEN) -> str:
    """A name that may stand in a graph's Python code, where `reserved` have a meaning; ValueError for any other."""
    if not isinstance(name, str) or not name.isascii() or not name.isidentifier() or name in reserved:
        raise ValueError(f"{str(name)[:60]!r} is not the name of a value")
    return name


def _check_argument(value: Any, graph: fx.Graph) -> Any:
    """An argument of a node, whose `repr` becomes Python code: a plain value, a node of its graph, or a tuple, list,
    map or slice of these. Raises ValueError for any other.
    """
    kind = type(value)
    items: Iterable[Any] = ()
    if kind in (tuple, list, Axis):
        items = value
    elif kind is dict:
        items = (*value, *value.values())
    elif kind is slice:
        items = (value.start, value.stop, value.step)
    elif value is not None and kind not in ARGUMENTS and not (kind is fx.Node and value.graph is graph):
        raise ValueError(f"a {kind.__name__} is no argument of an operation")
    for item in items:
        _check_argument(item, graph)
    return value


def _check_arguments(called: Any, args: tuple[Any, ...], graph: fx.Graph) -> tuple[Any, ...]:
    """The arguments of a node: those of control flow begin with programs and numbers, then come nodes."""
    programs, numbers = BODIES.get(called, (0, 0)) if callable(called) else (0, 0)
    first, rest = args[:programs], args[programs:]
    kinds = [type(arg) for arg in args[: programs + numbers]]
    if programs and kinds != [Program] * programs + [int] * numbers:
        raise ValueError(f"{called.__name__} has other bodies")
    _check_argument(rest, graph)
    return (*first, *rest)


_AS_THEY_ARE = frozenset((NoneType, bool, int, str))
"""What JSON has as it is."""


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
        if kind in _AS_THEY_ARE:
            return value
        if kind is float:
            return value if math.isfinite(value) else ["float", repr(value)]
        if kind in self.classes:
            return self.add_once(value, lambda: [kind.__name__, *self.each(_values(value))])
        if isinstance(value, fx.Node):
            return ["node", value.name]
        if kind in (tuple, torch.Size):
            return ["tuple", *self.each(value)]
        if isinstance(value, list):
            return ["list", *self.each(value)]
        if isinstance(value, dict):
            return ["map", *(self.each(entry) for entry in value.items())]
        if isinstance(value, frozenset):
            return ["set", *self.each(sorted(value))]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if isinstance(value, slice):
            return ["slice", *self.each((value.start, value.stop, value.step))]
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return ["torch", str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, torch.Tensor):
            return ["tensor", dtype_name(value.dtype), list(value.shape), value.flatten().tolist()]
        if isinstance(value, Mesh):
            return ["mesh", [[name, size] for name, size in value.axes.items()]]
        if isinstance(value, Program):
            return ["program", *self.program(value)]
        raise TypeError(f"a {kind.__name__} cannot be stored")

    def each(self, values: Iterable[Any]) -> list[Any]:
        """`encode` of each; most values are plain, which are not worth a call."""
        return [value if type(value) in _AS_THEY_ARE else self.encode(value) for value in values]

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
            None if why is None else self.add_once(why, reasons),
        ]

    def node(self, node: fx.Node) -> list[Any]:
        kwargs = self.encode(dict(node.kwargs)) if node.kwargs else None
        target = node.target if isinstance(node.target, str) else self.target(node.target)
        return [node.name, node.op, target, *self.each((node.args, node.meta.get(INFO))), kwargs]

    def target(self, target: Any) -> list[str]:
        """The operation or function that a node calls."""
        if isinstance(target, torch._ops.OpOverload) and _is_allowed(target):
            return ["op", str(target)]
        if target in _NAMES:
            return ["function", _NAMES[target]]
        raise TypeError(f"calls of {target} cannot be stored")


class _Reader:
    """Converts JSON back to values; the method `_KIND` reads a list of a kind in KINDS."""

    KINDS = (
        "pool", "node", "tuple", "list", "map", "set", "slice", "float", "complex", "device", "torch", "tensor", "mesh",
        "program",
    )  # fmt: skip
    _float = staticmethod(float)
    _complex = staticmethod(complex)
    _device = staticmethod(torch.device)

    def __init__(self, classes: dict[str, type], pool: list[Any]) -> None:
        self.classes, self.pool = classes, pool
        self.decoded: dict[int, tuple[Any, int]] = {}
        """The values of the pool with the number of values in each."""
        self.nodes: dict[str, fx.Node] = {}
        self.values = 0
        self.readers: dict[str, Callable[..., Any]] = {kind: getattr(self, f"_{kind}") for kind in self.KINDS}

    def decode(self, data: Any) -> Any:
        self.values += 1
        if self.values > _MOST_VALUES:
            raise ValueError(f"more than {_MOST_VALUES} values")
        if not isinstance(data, list):
            return data
        kind, *rest = data
        if kind in self.classes:
            return self.classes[kind](*map(self.decode, rest))
        return self.readers[kind](*rest)

    def _pool(self, number: int) -> Any:
        if number in self.decoded:
            value, count = self.decoded[number]
            self.values += count
            return value
        before = self.values
        value = self.decode(self.pool[number])
        self.decoded[number] = value, self.values - before
        return value

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
        return _PLAIN[name]

    def _tensor(self, dtype: str, shape: list[int], values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=self._torch(dtype)).reshape(shape)

    def _mesh(self, axes: list[list[Any]]) -> Mesh:
        return Mesh([(name, size) for name, size in axes])

    def _program(
        self, nodes: list[Any], mesh: Any, inputs: Any, outputs: Any, donated: Any, constants: Any, warnings: Any,
        records: Any, why: Any,
    ) -> Program:  # fmt: skip
        graph = fx.Graph()
        outer, self.nodes = self.nodes, {}
        tensors = self.decode(constants)
        for name, op, target, args, info, kwargs in nodes:
            if _check_name(name) in self.nodes:
                raise ValueError(f"two values named {name}")
            keywords = {} if kwargs is None else self.decode(kwargs)
            called = self._target(op, target, tensors)
            arguments = _check_arguments(called, tuple(self.decode(args)), graph)
            for keyword_name, value in keywords.items():
                _check_name(keyword_name, keyword.kwlist)
                _check_argument(value, graph)
            node = graph.create_node(op, called, arguments, keywords, name=name)
            node.name = name
            if info is not None:
                node.meta[INFO] = self.decode(info)
            self.nodes[name] = node
        program = Program(
            self.decode(mesh), graph, self.decode(inputs), self.decode(outputs), self.decode(records),
            self.decode(donated), tensors, self.decode(warnings),
            reasons=None if why is None else lambda name: self.decode(why)[name],
        )  # fmt: skip
        _check_ends(program)
        self.nodes = outer
        return program

    def _target(self, op: str, target: Any, constants: dict[str, torch.Tensor]) -> Any:
        """The target of a node: a name, or the operation or function that it calls."""
        if op in ("placeholder", "output", "get_attr"):
            if op == "get_attr" and target not in constants:
                raise ValueError(f"there is no constant {target!r}")
            return _check_name(target, keyword.kwlist)
        if op != "call_function":
            raise ValueError(f"nodes of kind {op!r}")
        kind, name = target
        if kind == "function":
            return FUNCTIONS[name]
        namespace, packet, overload = name.split(".")
        found = getattr(getattr(getattr(torch.ops, namespace), packet), overload) if namespace in OPS else None
        if kind != "op" or not isinstance(found, torch._ops.OpOverload) or str(found) != name or not _is_allowed(found):
            raise ValueError(f"calls of {name}")
        return found


def _check_ends(program: Program) -> None:
    """Raises ValueError unless a program has a node for each input and result, and all are what the program needs."""
    nodes = list(program.graph.nodes)
    feeds = [node for node in nodes if node.op == "placeholder"]
    results = [node for node in nodes if node.op == "output"]
    if len(feeds) != len(program.inputs) or [node.op for node in nodes[-1:]] != ["output"] or len(results) != 1:
        raise ValueError("its nodes are not those of its inputs and results")
    if not all(isinstance(port, Port) for port in (*program.inputs, *program.outputs)):
        raise ValueError("its inputs and outputs have no layouts")
    given = [value for value in results[0].args[0] if isinstance(value, fx.Node)]  # type: ignore[union-attr]
    if len(given) != len(program.outputs):
        raise ValueError(f"{len(given)} results and {len(program.outputs)} outputs")
    if any(o not in range(len(given)) or i not in range(len(feeds)) for o, i in program.donated.items()):
        raise ValueError("it donates values that it does not have")
    if not all(isinstance(info, Info) for node in nodes if (info := node.meta.get(INFO)) is not None):
        raise ValueError("its nodes are not described")


def _values(value: Any) -> list[Any]:
    names = _fields(value.__class__)
    return list(value) if names is None else [getattr(value, name) for name in names]


@cache
def _fields(kind: Any) -> tuple[str, ...] | None:
    """The fields of a dataclass that its constructor takes; None for a tuple."""
    return tuple(field.name for field in fields(kind) if field.init) if is_dataclass(kind) else None
