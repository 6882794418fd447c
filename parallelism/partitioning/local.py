"""Emitting one op on one device's shards, after the axes of its factors are chosen."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import getitem
from typing import Any, Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree
from tpshard.parallelism.factors import WHOLE
from tpshard.parallelism.graph import Op, Value, map_refs
from tpshard.parallelism.mesh import Axes, size_of
from tpshard.parallelism.node_info import INFO, Info, Spec, info, shape_of
from tpshard.parallelism.partitioning.choose import Choice, layout_of, share
from tpshard.parallelism.resharding import halo
from tpshard.parallelism.resharding.lower import Emitter, is_first, pick
from tpshard.parallelism.resharding.new_nodes import call
from tpshard.parallelism.rules.control_flow import numbers
from tpshard.parallelism.rules.rule import Rule, Window
from tpshard.parallelism.rules.strides import dense_exactly, dense_last
from tpshard.parallelism.rules.table import entry_of
from tpshard.parallelism.sharding import local_shape, local_size
from tpshard.parallelism.why import Demand, through

aten = torch.ops.aten
_DENSE = {"last": dense_last, "all": aten.contiguous.default, "exactly": dense_exactly}


class LocalPart:
    """The implementation of `rules.rule.LocalOp`, with which a rule's `local` emits one op on one device."""

    def __init__(self, emitter: Emitter, op: Op, rule: Rule, choice: Choice, inputs: list[fx.Node]):
        self.emitter, self.op, self.rule, self.choice = emitter, op, rule, choice
        self.entry = entry_of(op.target)
        self.inputs = [self._dense(node) for node in inputs] if self.entry.dense else inputs
        self.flops, self.global_flops = round(rule.flops * share(rule, choice)), rule.flops

    def _dense(self, node: fx.Node) -> fx.Node:
        """The tensor with the memory layout that the op's kernel needs."""
        (spec,) = info(node).specs
        if not spec.shape:
            return node
        return self.emitter.call(_DENSE[self.entry.dense], (node,), [spec])

    def axes(self, factor: int) -> Axes:
        return self.choice.get(factor, WHOLE).axes

    def size(self, factor: int) -> int:
        return local_size(self.rule.sizes[factor], *self.choice.get(factor, WHOLE))

    def shape(self, result: int = 0) -> tuple[int, ...]:
        value, dims = self.op.results[result], self.rule.results[result]
        return local_shape(value.shape, layout_of(self.rule, dims, self.choice, False))

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        value, dims = self.op.operands[operand], self.rule.operands[operand]
        return local_shape(value.shape, layout_of(self.rule, dims, self.choice, False))

    def offset(self, factor: int) -> Any:
        axes, grain = self.choice.get(factor, WHOLE)
        return self.emitter.offset(axes, self.rule.sizes[factor], grain)

    def position(self, factor: int) -> Any:
        return self.emitter.position(self.axes(factor))

    def shape_of(self, node: Any) -> tuple[int, ...]:
        return shape_of(node)

    def dtype_of(self, node: Any) -> Any:
        return info(node).specs[0].dtype

    def gather(self, node: Any, factor: int) -> Any:
        why = self._why("others", self.op.results[0])
        return self.emitter.stack(node, self.axes(factor), why)

    def valid(self, factor: int) -> Any:
        axes, grain = self.choice.get(factor, WHOLE)
        size, part = self.rule.sizes[factor], self.size(factor)
        return part if size == part * size_of(axes) else self.emitter.valid(axes, size, grain)

    # ---- neighbours -------------------------------------------------------------------------------------
    def window(self, operand: int, reader: int | None = None) -> Any:
        if self.rule.moving:
            return self._moved[reader - len(self.op.operands) if reader else 0]
        node = self.inputs[operand]
        for _, axes, plan, window in self._halos(operand, len(self.op.operands) if reader is None else reader):
            size = self._tensor(operand).shape[window.dim]
            node = halo.window(self.emitter, node, window.dim, size, axes, plan, window.fill, self._near(operand))
        return node

    @functools.cached_property
    def _moved(self) -> list[fx.Node]:
        """The shards of all results, of a rule that only moves elements: along one sharded factor after another."""
        reads = dict.fromkeys(window.read for _, window in self.rule.windows)
        nodes = [self.inputs[i] for i in reads] if reads else self.inputs  # dims of size 1 have no window
        results = [self.shape(i) for i in range(len(self.op.results))]
        for f, window in {f: window for f, window in self.rule.windows if f in self.choice}.items():
            plan, size = halo.plan_of(self.op, self.rule, f, self.axes(f)), self._tensor(0).shape[window.dim]
            nodes = [halo.keep_strided(self.emitter, node, size, self.axes(f), window) for node in nodes]
            lengths = [-(-shape[window.reader_dim] // window.scale) for shape in results]
            nodes = self.emitter.move_runs(nodes, window.dim, self.axes(f), plan, lengths, self._near(0))
        return nodes

    def fold(self, node: Any, read: int, reader: int) -> Any:
        for _, axes, plan, window in reversed(list(self._halos(read, reader))):
            size = self._tensor(read).shape[window.dim]
            node = halo.fold(self.emitter, node, window.dim, size, axes, plan, self._near(read))
        return node

    def begin(self, factor: int, read: int) -> Any:
        readers = {w.reader for f, w in self.rule.windows if (f, w.read) == (factor, read)}
        for f, axes, plan, _ in (each for reader in readers for each in self._halos(read, reader)):
            if f == factor:
                return self.emitter.ranked_number(pick, axes, plan.begins)
        return 0

    def _tensor(self, place: int) -> Value:
        return (*self.op.operands, *self.op.results)[place]

    def _halos(self, read: int, reader: int) -> Iterator[tuple[int, Axes, halo.Halo, Window]]:
        for f, window in self.rule.windows:
            if f in self.choice and (window.read, window.reader) == (read, reader):
                plan = halo.halo_in(self.op, self.axes(f), window)
                assert plan is not None, "a choice shards a window that has no halo"
                yield f, self.axes(f), plan, window

    def _near(self, place: int) -> dict[str, Any]:
        return self._why("neighbours", self._tensor(place))

    def _why(self, kind: Literal["neighbours", "others"], value: Value) -> dict[str, Any]:
        demand = Demand(kind, through(self.op), value.name)
        return {"why": (demand,), "value": (value.name,), "of": value.role or "activation"}

    def first(self, factor: int) -> Any:
        axes = self.axes(factor)
        return self.emitter.call(is_first, (self.emitter.position(axes),), []) if axes else 1

    def emit(self, target: Any, *args: Any, work: bool = False, **kwargs: Any) -> fx.Node:
        """Adds a node of the local op; `work` marks the node that does the op's FLOPs (by default only `same`'s)."""
        node = self.emitter.call(target, args, infer_specs(target, args, kwargs), kwargs)
        if work or not self.entry.saved:
            self._count(node)
        return node

    def same(self, **kwargs: Any) -> Any:
        return self.with_args(*self.op.args, **kwargs)

    def with_args(self, *args: Any, **kwargs: Any) -> Any:
        local_args = map_refs(tuple(args), lambda ref: self.inputs[ref.index])
        keywords = {k: map_refs(v, lambda ref: self.inputs[ref.index]) for k, v in {**self.op.kwargs, **kwargs}.items()}
        specs = [Spec(self.shape(i), r.dtype) for i, r in enumerate(self.op.results)]
        node = self.emitter.call(self.op.target, local_args, specs, keywords)
        self._count(node)
        returns = getattr(getattr(self.op.target, "_schema", None), "returns", (None,))
        if len(specs) == 1 and len(returns) == 1 and "List" not in str(returns[0].type if returns[0] else ""):
            return node
        return self._parts(node, specs)

    def with_bodies(self, programs: Sequence[Any], flops: int, whole: int) -> list[Any]:
        """The same operation of control flow, on the local operands and with these bodies."""
        specs = [Spec(self.shape(i), r.dtype) for i, r in enumerate(self.op.results)]
        args = (*programs, *numbers(self.op.args), *self.inputs)
        node = self.emitter.call(self.op.target, args, specs, flops=flops, global_flops=whole, saved=True)
        return self._parts(node, specs)

    def several(
        self, target: Any, *args: Any, work: float | None = None, busiest: float = 1.0, **kwargs: Any
    ) -> list[Any]:
        specs = infer_specs(target, args, kwargs)
        node = self.emitter.call(target, args, specs, kwargs)
        if work is None:
            self._count(node)
        else:
            flops, whole = round(self.flops * work * busiest), round(self.global_flops * work)
            node.meta[INFO] = replace(info(node), flops=flops, global_flops=whole, saved=self.entry.saved)
        return self._parts(node, specs)

    def members(self, factor: int) -> int:
        return size_of(self.axes(factor))

    def pick(self, factor: int, table: Sequence[int]) -> Any:
        return self.emitter.ranked_number(pick, self.axes(factor), tuple(table))

    def send(self, node: Any, factor: int, to: Sequence[int]) -> Any:
        demand = Demand("others", through(self.op), self.op.name)
        why = {"why": (demand,), "value": (self.op.name,), "of": "activation"}
        return self.emitter.send(node, self.axes(factor), to, why)

    def dtype(self, result: int) -> Any:
        return self.op.results[result].dtype

    def _parts(self, node: fx.Node, specs: Sequence[Spec]) -> list[Any]:
        parts = []
        for i, spec in enumerate(specs):
            part = call(self.emitter.graph, getitem, (node, i))
            part.meta[INFO] = Info((spec,), self.op.name, self.op.place)
            parts.append(part)
        return parts

    def _count(self, node: fx.Node) -> None:
        if self.global_flops:
            node.meta[INFO] = replace(
                info(node), flops=self.flops, global_flops=self.global_flops, saved=self.entry.saved
            )
            self.flops = self.global_flops = 0


def infer_specs(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Spec]:
    """The shapes and dtypes of a call's results, which torch infers from tensors without data; none for a number."""

    def without_data(node: fx.Node) -> Any:
        specs = info(node).specs
        return torch.empty(specs[0].shape, dtype=specs[0].dtype, device="meta") if specs else 0

    keywords = {**fx.map_arg(kwargs, without_data), **({"device": "meta"} if takes_device(target) else {})}
    results = target(*fx.map_arg(args, without_data), **keywords)
    return [Spec(tuple(x.shape), x.dtype) for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]


@functools.cache
def takes_device(target: Any) -> bool:
    """Whether an ATen op has an argument `device`."""
    return any(argument.name == "device" for argument in getattr(getattr(target, "_schema", None), "arguments", ()))
