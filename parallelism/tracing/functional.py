"""Functionalization: turns a recorded graph with in-place writes into one in which every op makes new tensors.

A write may be visible through any view of the tensor, or through other names of it. torch's own functionalization
handles these; it runs on the recorded ops, below autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from tpshard.kernels.fake_mode import fake_mode
from tpshard.parallelism.graph import Graph, Op, Place, Ref, Value, map_refs
from tpshard.parallelism.rules.control_flow import CONTROL_FLOW
from tpshard.parallelism.rules.strides import contiguous
from tpshard.parallelism.tracing.recorder import Recorder
from tpshard.parallelism.tracing.remember import Like, fake

aten = torch.ops.aten


def writes(op: Op) -> bool:
    """Whether an op modifies one of its operands."""
    schema = getattr(op.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def writes_own_inputs(op: Op) -> bool:
    """Whether an op modifies only graph inputs that no other op reads, such as a cache, and returns a new tensor.

    Functionalization leaves such an op as it is.
    """
    schema = op.target._schema
    if any(result.alias_info is not None for result in schema.returns):
        return False
    written = [
        a for a, parameter in zip(op.args, schema.arguments) if parameter.alias_info and parameter.alias_info.is_write
    ]
    values = [op.operands[a.index] if isinstance(a, Ref) else None for a in written]
    return bool(values) and all(v is not None and v.producer is None and v.users == [op] for v in values)


def functionalize(graph: Graph) -> Graph:
    """Returns a graph of the same function without in-place writes; the graph itself if it has none.

    Raises ValueError where an argument or a constant of the function is modified, since that change would be lost.
    """
    if not any((writes(op) and not writes_own_inputs(op)) or op.target is aten.as_strided.default for op in graph.ops):
        return graph
    return _Replay(graph).run()


class _Functional(Recorder):
    """A recorder that records `as_strided` as an indexing op; its graph has no writes that such a view would show."""

    def __init__(self, place: Callable[[], Place]):
        super().__init__(place)
        self.decompositions = self.decompositions | {
            aten.as_strided.default: _as_strided, aten.as_strided_scatter.default: _strided_scatter
        }  # fmt: skip


class _Replay:
    """Replays a graph's ops on fake tensors wrapped for functionalization, under a new recorder."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.mode = fake_mode()
        self.place = Place()
        self.recorder = _Functional(lambda: self.place)
        self.env: dict[Value, Any] = {}
        self.reshaping = any(torch.Tag.inplace_view in getattr(op.target, "tags", ()) for op in graph.ops)
        """Whether an op changes a tensor's shape in place: other names of the tensor are then different tensors."""

    def run(self) -> Graph:
        stand_ins: list[tuple[Value, Tensor]] = []
        for value in self.graph.inputs:
            stand_ins.append((value, self._stand_in(value)))
            self.recorder.input(value.name, stand_ins[-1][1])
        for name, (value, constant) in self.graph.constants.items():
            stand_ins.append((value, self._stand_in(value)))
            self.recorder.constant(name, constant, stand_ins[-1][1])
        with self.mode, self.recorder, _wrapping():
            for value, plain in stand_ins:
                self.env[value] = torch._to_functional_tensor(plain)
            for op in self.graph.ops:
                self._replay_op(op)
            outputs = [self._plain(o) if isinstance(o, Value) else o for o in self.graph.outputs]
            changed = [value.name for value, plain in stand_ins if self._plain(value) is not plain]
        if changed:
            raise ValueError(
                f"the function modifies its argument `{changed[0]}` in place, and that change would be lost. Work on "
                f"a copy (`{changed[0]}.clone()`) and return it"
            )
        graph = self.recorder.graph(outputs)
        left = next((op for op in graph.ops if writes(op) and not writes_own_inputs(op)), None)
        if left is not None:
            raise ValueError(f"`{left.target}` writes into a tensor in an unsupported way")
        graph.in_tree, graph.out_tree = self.graph.in_tree, self.graph.out_tree
        graph.seed = None if self.graph.seed is None else graph.inputs[-1]
        return graph

    def _stand_in(self, value: Value) -> Tensor:
        like = Like(value.shape, contiguous(value.shape), value.dtype, torch.device("cpu"))
        return fake(self.mode, like)

    def _plain(self, value: Value) -> Tensor:
        """The tensor behind a wrapped one, after all writes to it."""
        wrapped = self.env[value]
        torch._sync(wrapped)
        return torch._from_functional_tensor(wrapped)

    def _replay_op(self, op: Op) -> None:
        self.place = op.place
        if op.target in (aten.alias.default, aten.detach.default) and not self.reshaping:
            self.env[op.results[0]] = self.env[op.operands[0]]
            return
        if op.target is aten.lift_fresh_copy.default:  # a constant: once written to, it is another tensor
            self.env[op.results[0]] = torch._to_functional_tensor(self._plain(op.operands[0]))
            return
        if op.target in CONTROL_FLOW:
            operands = [self.recorder.value(self._plain(value)) for value in op.operands]
            with _wrapping(False):
                plain = [self._stand_in(value) for value in op.results]
            self.recorder.control_flow(op.target, op.args[: -len(operands)], operands, plain)
            self.env.update(zip(op.results, map(torch._to_functional_tensor, plain)))
            return
        if op.target.namespace == "aten" or op.target.namespace == "prims":
            args, kwargs = self._arguments(op, lambda value: self.env[value])
            try:
                output = op.target(*args, **kwargs)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0]
                raise ValueError(f"`{op.target}` writes into a tensor in an unsupported way: {reason}") from error
            results = list(output) if isinstance(output, (list, tuple)) else [output]
        else:  # torch cannot functionalize custom ops, so they get plain tensors
            if writes(op) and not writes_own_inputs(op):
                raise ValueError(f"`{op.target}` modifies a tensor in place that other operations read")
            args, kwargs = self._arguments(op, self._plain)
            with _wrapping(False):
                output = op.target(*args, **kwargs)
                plain = list(output) if isinstance(output, (list, tuple)) else [output]
            results = [torch._to_functional_tensor(p) if isinstance(p, Tensor) else p for p in plain]
        self.env.update(zip(op.results, results))

    def _arguments(self, op: Op, read: Any) -> tuple[Any, Any]:
        def change(tree: Any) -> Any:
            return map_refs(tree, lambda ref: read(op.operands[ref.index]))

        args = [list(a) if isinstance(a, tuple) and not isinstance(a, Ref) else a for a in map(change, op.args)]
        return args, {key: change(arg) for key, arg in op.kwargs.items()}


def _as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    """`as_strided` as a lookup of positions in the tensor's memory."""
    flat, _ = _flat(x)
    return aten.index.Tensor(flat, [_places(x, size, stride, offset)])


def _strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor:
    flat, order = _flat(x)
    written = flat.index_put((_places(x, size, stride, offset),), source)
    back = [order.index(d) for d in range(x.dim())]
    return written.view([x.shape[d] for d in order]).permute(back)


def _flat(x: Tensor) -> tuple[Tensor, list[int]]:
    """The elements of a tensor in memory order, and its dims in that order."""
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: (-strides[d], -x.shape[d]))
    stored = x.permute(order)
    if not stored.is_contiguous():
        raise ValueError("`aten.as_strided.default` of a tensor that does not fill its memory is not supported")
    return stored.reshape(-1), order


def _places(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Tensor:
    """The position among the elements of `x`, in memory order, of each element of a strided view: int64 [*size].

    ValueError where the view has elements of the tensor that `x` is a part of.
    """
    first = 0 if offset is None else offset - int(x.storage_offset())
    last = first + sum((n - 1) * step for n, step in zip(size, stride))
    if first < 0 or last >= x.numel():
        raise ValueError("`aten.as_strided.default` of elements outside of the view it is called on is not supported")
    place = torch.full(tuple(size), first, dtype=torch.int64)
    for d, (n, step) in enumerate(zip(size, stride)):
        place = place + (torch.arange(n) * step).view(-1, *[1] * (len(size) - 1 - d))
    return place


@contextmanager
def _wrapping(on: bool = True) -> Iterator[None]:
    """A context that switches functionalization on, or off for a part of an outer context."""
    enable, disable = (lambda: torch._enable_functionalization(reapply_views=True)), torch._disable_functionalization
    first, last = (enable, disable) if on else (disable, enable)
    first()
    try:
        yield
    finally:
        last()
