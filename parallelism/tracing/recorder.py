"""Recording the ops that a function runs, on fake tensors and below autograd, as `Op`s of the global graph.

It replaces `make_fx`, without proxies and without a second graph to translate.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table, get_decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.graph import _Namespace
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed
from tpshard.parallelism.draws import DRAW, RANDOM, SEED, strides_of
from tpshard.parallelism.graph import Graph, Op, Place, Ref, Value
from tpshard.parallelism.rules.control_flow import CONTROL_FLOW, bodies
from tpshard.parallelism.rules.table import OTHER, TABLE, entry_of
from tpshard.parallelism.tracing.remember import Shapes

aten = torch.ops.aten


@functools.cache
def decompositions() -> dict[Any, Any]:
    """The decompositions of ops that are not recorded as they are, by overload: the table's, and torch's for others."""
    table: dict[Any, Any] = {}
    for func, split in decomposition_table.items():
        if isinstance(func, torch._ops.OpOverload) and entry_of(func) is OTHER and not _is_view_or_composite(func):
            table[func] = split
    for name, entry in TABLE.items():
        if entry.recorded == "decomposed":
            with contextlib.suppress(RuntimeError):
                table |= get_decompositions([_op_of(name)])
        elif callable(entry.recorded):
            named = _op_of(name)
            one = isinstance(named, torch._ops.OpOverload)
            each = [named] if one else [getattr(named, overload) for overload in named.overloads()]
            table |= dict.fromkeys(each, entry.recorded)
    return table


def _is_view_or_composite(func: Any) -> bool:
    composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return composite or any(result.alias_info is not None for result in func._schema.returns)


def _op_of(name: str) -> Any:
    """The op of a name: `aten.add`, with all its overloads, or one overload, `aten.add.Tensor`."""
    return functools.reduce(getattr, name.split("."), torch.ops)


class Recorder(TorchDispatchMode):
    """A dispatch mode that records ops as they run, inside a `FakeTensorMode`.

    place: returns the place of the running op. rows: those of a batch whose draws depend on the row's place in a step
    (see `draws`); 0 if there is none.
    """

    supports_higher_order_operators = True
    """Set so that higher-order operators arrive here and are refused."""

    def __init__(self, place: Callable[[], Place], rows: int = 0) -> None:
        super().__init__()
        self.place, self.rows = place, rows
        self.inputs: list[Value] = []
        self.ops: list[Op] = []
        self.constants: dict[str, tuple[Value, Tensor]] = {}
        self.decompositions = decompositions()
        self.names: dict[str, _Namespace] = {}
        """The names of ops by module."""
        self.value_of: dict[int, tuple[Value, Tensor]] = {}
        """The value of each tensor, by the tensor's identity, and the tensor, kept alive.

        After a change in place it is the newest value.
        """
        self.composite: dict[Any, bool] = {}
        self.splitting: list[Any] = []
        """Ops whose decompositions are running."""
        self.shapes = Shapes()
        self.body: Recorder | None = None
        """The recorder of a body of control flow, while that is traced."""
        self.seed: Tensor | None = None
        """The seed input, after all others, if the function draws random numbers."""
        self.draws = 0

    def input(self, name: str, fake: Tensor) -> None:
        """Records the function's next argument as an input of the graph."""
        value = Value(name, tuple(fake.shape), fake.dtype, None, len(self.inputs))
        self.inputs.append(value)
        self.value_of[id(fake)] = (value, fake)

    def constant(self, name: str, tensor: Tensor, fake: Tensor) -> Value:
        """Adds a constant of the function, which `fake` stands for."""
        value = Value(name, tuple(tensor.shape), tensor.dtype)
        self.constants[name] = (value, tensor)
        self.value_of[id(fake)] = (value, fake)
        return value

    def graph(self, outputs: list[Any]) -> Graph:
        """The graph of the recorded ops, with these results of the function."""
        results = [self.value(o) if isinstance(o, Tensor) else o for o in outputs]
        graph = Graph(self.inputs, self.ops, results, self.constants)
        graph.seed = None if self.seed is None else self.value_of[id(self.seed)][0]
        graph.refresh_users()
        return graph

    def value(self, tensor: Tensor) -> Value:
        """The value of a tensor; a tensor that no op has produced becomes a constant."""
        if id(tensor) in self.value_of:
            return self.value_of[id(tensor)][0]
        return self.constant(f"_tensor_constant{len(self.constants)}", tensor, tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.body is not None:
            return self.body.__torch_dispatch__(func, types, args, kwargs)
        if func is DRAW:
            return self._draw(*args)
        if not isinstance(func, torch._ops.OpOverload):
            raise ValueError(f"`{func}` is not an ATen op and cannot be partitioned")
        if entry_of(func).recorded == "answered":
            if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
                return args[0].fake_device  # answered without dispatch, because autograd asks it of every tensor
            return func(*args, **kwargs)
        decomposition = self.decompositions.get(func)
        if decomposition is None and func.namespace == "prims":  # an op by another name
            decomposition = getattr(func, "impl_aten", None)
        if decomposition is not None and func not in self.splitting:
            self.splitting.append(func)  # a decomposition may call the op itself, with other dtypes
            try:
                with self:
                    result = decomposition(*args, **kwargs)
            finally:
                self.splitting.pop()
            if result is not NotImplemented:  # a decomposition returns it for operands it does not support
                return result
        operands: list[Tensor] = []
        refs = _refs(args, operands)
        keywords = {key: _refs(arg, operands) for key, arg in kwargs.items()}
        if self._is_composite(func, operands):
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten.lift_fresh.default:  # the result may be changed in place later; the constant stays
            func = aten.lift_fresh_copy.default
        # before the op runs, since it may change a tensor that it reads
        values = [self.value(tensor) for tensor in operands]
        result = self.shapes.run(func, args, kwargs, (refs, keywords), operands)
        if isinstance(result, (int, float, bool)):
            return result  # of a constant: its value is known while tracing
        self._record(func, refs, keywords, values, result)
        return result

    def _draw(self, size: Any, dtype: torch.dtype) -> Tensor:
        """Records the next draw from the seed, which becomes an input of the graph."""
        if self.seed is None:
            self.seed = torch.empty((5,) if self.rows else (), dtype=torch.int64)
            self.input(SEED, self.seed)
        self.draws += 1
        row = size[0] // self.rows if self.rows and size and size[0] % self.rows == 0 else 0
        with self:
            return RANDOM(self.seed, self.draws, list(size), [0] * len(size), strides_of(size), dtype, row)

    def _is_composite(self, func: Any, operands: list[Tensor]) -> bool:
        """Whether eager mode runs other ops in place of this one, because autograd decomposes it."""
        composite = self.composite.get(func)
        if composite is None:
            implicit = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
            composite = implicit and autograd_would_have_decomposed(func, operands)
            self.composite[func] = composite
        return composite

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], operands: list[Value], returned: Any) -> None:
        packet = func.overloadpacket.__name__
        if entry_of(func).random:
            raise ValueError(
                f"`{func}` is a random op whose numbers cannot be told by their position: pass them in as an input"
            )
        place = self.place()
        name = self._name(packet, place)
        op = Op(name, func, args, kwargs, operands, [], place)
        several = isinstance(returned, (list, tuple))
        for i, one in enumerate(returned if several else [returned]):
            label = f"{name}.{i}" if several else name
            if isinstance(one, Tensor):
                op.results.append(Value(label, tuple(one.shape), one.dtype, op, i))
                self.value_of[id(one)] = (op.results[-1], one)
            else:
                op.results.append(Value(label, (), torch.int64, op, i))
        self.ops.append(op)

    def control_flow(
        self, target: Any, args: Sequence[Any], operands: Sequence[Value], results: Sequence[Tensor]
    ) -> None:
        """Records an operation that runs bodies (see `parallelism.rules.control_flow`), with these results."""
        place = self.place()
        name = self._name(target.__name__, place)
        for part, graph in zip(CONTROL_FLOW[target], bodies(args, Graph)):
            for i, value in enumerate(graph.inputs):
                value.name = f"{name}.{part}.input{i}"
        args = (*args, *(Ref(i) for i in range(len(operands))))
        op = Op(name, target, args, {}, list(operands), [], place)
        for i, one in enumerate(results):
            op.results.append(Value(f"{name}.{i}", tuple(one.shape), one.dtype, op, i))
            self.value_of[id(one)] = (op.results[-1], one)
        self.ops.append(op)

    def _name(self, packet: str, place: Place) -> str:
        """A new op's name: its module's path and its kind, counted by module, so that equal layers name ops alike."""
        name = self.names.setdefault(place.module, _Namespace()).create_name(packet, None)
        return f"{place.module}.{name}" if place.module else name


def _refs(arg: Any, operands: list[Tensor]) -> Any:
    """Replaces every tensor in an argument by a `Ref`; the tensors are appended to `operands`."""
    if isinstance(arg, Tensor):
        operands.append(arg)
        return Ref(len(operands) - 1)
    if isinstance(arg, (list, tuple)):
        return tuple([_refs(a, operands) for a in arg])
    return arg
