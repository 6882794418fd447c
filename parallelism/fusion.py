"""What the nodes of a program cost as kernels: which values reach memory, how many bytes each node moves.

Run by the interpreter every node is a kernel and every result is written. Compiled, pointwise operations and
reductions between two matrix products (or collectives) become one kernel, and only what others read is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx
from tpshard.parallelism.cost import Device, Work, operation
from tpshard.parallelism.program import INFO, Info, Program, Spec

_VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "detach",
    "alias", "unflatten", "flatten", "split", "split_with_sizes", "chunk", "unbind", "name", "getitem", "as_strided",
    "wait_tensor", "narrow", "reshape", "view_as", "lift_fresh", "expand_as", "_getitem", "named", "boundary",
}  # fmt: skip
_SELECTING = {"getitem", "_getitem", "wait_tensor", "name", "named", "boundary", "detach", "alias", "lift_fresh"}
_POINTWISE = {"_to_copy", "roll", "clone", "full_like", "ones_like", "zeros_like", "arange", "full", "scalar_tensor"}
_LOOKUPS = {"embedding", "index_select", "gather", "index"}
_MOST_READS = 2
"""Operands of its size from which on a value with several readers is written rather than computed again."""
_MATMULS = {"mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "convolution", "einsum"}
_EMPTY = Info(())


def op_name(node: fx.Node) -> str:
    """`mm`, `view`, `all_gather_into_tensor`, ...: the operation without namespace and overload."""
    target = node.target
    packet = getattr(target, "overloadpacket", None)
    if packet is not None:
        return str(packet.__name__)
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def known(node: fx.Node) -> Info:
    """A node's `Info`, or an empty one."""
    found = node.meta.get(INFO)
    return found if isinstance(found, Info) else _EMPTY


def views(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes whose result lies in their operand's storage. A reshape that cannot be a view copies, as in torch."""
    found: set[fx.Node] = set()
    strides: dict[fx.Node, tuple[int, ...]] = {}  # of what is not contiguous
    for node in nodes:
        if node.op != "call_function" or op_name(node) not in _VIEWS or not node.all_input_nodes:
            continue
        source = node.all_input_nodes[0]
        here, there = known(node).specs, known(source).specs
        if op_name(node) in _SELECTING or not here or len(there) != 1:
            found.add(node)
            if source in strides:
                strides[node] = strides[source]
            continue
        moved = _view(node, there[0].shape, strides.get(source) or contiguous(there[0].shape), here[0].shape)
        if moved is None:
            continue
        found.add(node)
        if moved != contiguous(here[0].shape):
            strides[node] = moved
    return found


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= size
    return tuple(reversed(out))


def _view(
    node: fx.Node, before: Sequence[int], strides: Sequence[int], after: Sequence[int]
) -> tuple[int, ...] | None:
    """Strides of a view; None where the operation has to copy."""
    name, args = op_name(node), node.args
    if name == "permute":
        return tuple(strides[d] for d in args[1])  # type: ignore[union-attr, index, misc]
    if name in ("transpose", "t"):
        order = list(strides)
        first, second = (args[1], args[2]) if name == "transpose" else (0, len(order) - 1)
        order[first], order[second] = order[second], order[first]  # type: ignore[index]
        return tuple(order)
    if name == "expand":
        pad = len(after) - len(before)
        old = (1,) * pad + tuple(before)
        full = (0,) * pad + tuple(strides)
        return tuple(0 if o == 1 and n != 1 else s for o, n, s in zip(old, after, full))
    if name in ("slice", "narrow", "split", "split_with_sizes", "chunk") and len(before) == len(after):
        return tuple(strides)
    if name in ("reshape", "view", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten"):
        return reshaped(before, strides, after)
    return contiguous(after)


def reshaped(before: Sequence[int], strides: Sequence[int], after: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of `before` seen as `after` without a copy, or None (the rule of torch's `view`)."""
    if 0 in before:
        return contiguous(after)
    chunks: list[tuple[int, int]] = []  # (elements, stride of the last), each contiguous in itself
    for size, stride in zip(before, strides):
        if size == 1:
            continue
        if chunks and chunks[-1][1] == size * stride:
            chunks[-1] = (chunks[-1][0] * size, stride)
        else:
            chunks.append((size, stride))
    out: list[int] = []
    left, step = 1, 1
    pending = list(reversed(chunks))
    for size in reversed(after):
        if size == 1:
            out.append(step)
            continue
        if left == 1:
            if not pending:
                return None
            left, step = pending.pop(0)
        if left % size:
            return None
        out.append(step)
        step, left = step * size, left // size
    return tuple(reversed(out))


def result_bytes(node: fx.Node) -> int:
    return sum(spec.bytes for spec in known(node).specs)


@dataclass
class Kernel:
    """One node as the device runs it."""

    node: fx.Node
    work: Work
    flops: int
    moved: int
    """Bytes read and written in the device's memory."""
    written: int
    """Bytes of new storage: 0 for views and for values that stay inside a fused kernel."""
    dtype: str
    counts: bool
    """Whether it has a kernel launch of its own (the first of a fused group has)."""
    compiled: bool = False


def classify(node: fx.Node, is_view: bool) -> Work:
    if node.op != "call_function" or is_view:
        return "free"
    name, here = op_name(node), known(node)
    if here.comm is not None:
        return "free"
    if name in ("attention", "paged_attention"):
        return "attention"
    if name == "attention_backward":
        return "attention_backward"
    if here.flops and (name in _MATMULS or "mm" in name):
        return "matmul"
    # integers that the executor evaluates from the rank
    return "stream" if here.specs else "free"


def inputs_of(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes


Compiled = Literal["all", "layers", "rest", "none"]
"""What a compiler sees: the whole program, the layers (`layers.3...`), all but them, or nothing."""

_LAYER = re.compile(r"(^|\.)\d+(\.|$)")


def sees(compiled: Compiled, node: fx.Node) -> bool:
    """Whether the compiler sees a node."""
    if compiled in ("all", "none"):
        return compiled == "all"
    return (compiled == "layers") == bool(_LAYER.search(known(node).module))


def kernels(program: Program, *, compiled: Compiled) -> list[Kernel]:
    """A `Kernel` for every node of the program, in issue order."""
    nodes = program.nodes
    seen_through = views(nodes)
    works = {node: classify(node, node in seen_through) for node in nodes}
    root = roots(nodes, seen_through)
    seen_by = {node: sees(compiled, node) for node in nodes}
    inner = _Fused(nodes, works, root, seen_through, seen_by) if compiled != "none" else None
    seen: set[tuple[Any, fx.Node]] = set()
    opened: set[Any] = set()
    out = []
    for node in nodes:
        work, here = works[node], known(node)
        dtype = _dtype(node)
        if here.comm is not None and node.op == "call_function":
            out.append(Kernel(node, "free", 0, 0, result_bytes(node), dtype, False))
            continue
        if work == "free":
            out.append(Kernel(node, "free", 0, 0, 0, dtype, False, seen_by[node]))
            continue
        mine = inner.group.get(node, node) if inner is not None else node
        size = result_bytes(node)
        written = 0 if inner is not None and node in inner.inlined else size
        read = 0
        if inner is None or node not in inner.inlined:
            for source, shown in _sources(node, root, inner):
                # within one fused kernel a value is read once; a view reads no more than it shows
                if (mine, source) not in seen:
                    seen.add((mine, source))
                    read += shown
        if op_name(node) in _LOOKUPS:
            read = min(read, 2 * size + 8)
        counts = mine not in opened and (inner is None or node not in inner.inlined)
        out.append(Kernel(node, work, here.flops, read + written, written, dtype, counts, seen_by[node]))
        if counts:
            opened.add(mine)
    return out


def _sources(node: fx.Node, root: dict[fx.Node, fx.Node], fused: _Fused | None) -> list[tuple[fx.Node, int]]:
    """(storage, bytes read of it) behind a node's operands, through what is inlined into it."""
    found: dict[fx.Node, int] = {}
    queue = [(source, root[source]) for source in inputs_of(node)]
    visited: set[fx.Node] = set()
    while queue:
        source, base = queue.pop()
        if fused is not None and base in fused.inlined:
            if base not in visited:
                visited.add(base)
                queue.extend((s, root[s]) for s in inputs_of(base))
            continue
        mine = fused.group.get(node) if fused is not None else None
        if fused is not None and mine is not None and base is not node and fused.group.get(base) is mine:
            continue  # stays in registers, though it may be written too
        shown = min(result_bytes(source), max(result_bytes(base), 1))
        found[base] = max(found.get(base, 0), shown)
    return list(found.items())


class _Fused:
    """What a compiler does to pointwise operations and reductions.

    A pointwise value is computed again in each kernel that reads it (`inlined`) unless something else than such a
    kernel reads it, or it has several readers and takes several operands (one, where the backward pass reads it: one
    value is kept then, not two). What is left forms kernels (`group`): connected, with as many matrix products or
    collectives behind them.
    """

    def __init__(
        self, nodes: Sequence[fx.Node], works: dict[fx.Node, Work], root: dict[fx.Node, fx.Node],
        seen_through: set[fx.Node], seen_by: dict[fx.Node, bool],
    ):  # fmt: skip
        self.group = _groups(nodes, works, seen_through, seen_by)
        outputs = {root[n] for node in nodes if node.op == "output" for n in node.all_input_nodes}
        readers = _readers(nodes, root, seen_through)
        self.inlined: set[fx.Node] = set()
        reads: dict[fx.Node, set[fx.Node]] = {}
        for node in nodes:
            if works[node] != "stream" or not seen_by[node]:
                continue
            mine: set[fx.Node] = set()
            for source in inputs_of(node):
                base = root[source]
                mine |= reads[base] if base in self.inlined else {base}
            reads[node] = mine
            users = readers.get(node, ())
            large = sum(2 * result_bytes(source) >= result_bytes(node) for source in mine)
            crosses = _forward(node) and not all(_forward(user) for user in users)
            if node in outputs or any(works[user] != "stream" or not seen_by[user] for user in users):
                continue
            if is_pointwise(node) and (len(users) <= 1 or large <= (1 if crosses else _MOST_READS)):
                self.inlined.add(node)


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of a result depends on one element of each operand."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or op_name(node) in _POINTWISE


def roots(nodes: Sequence[fx.Node], seen_through: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The node whose storage a node's result lies in: itself, or the source of a chain of views and waits."""
    root: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        sources = inputs_of(node)
        root[node] = root[sources[0]] if node in seen_through and sources else node
    return root


def _readers(
    nodes: Sequence[fx.Node], root: dict[fx.Node, fx.Node], seen_through: set[fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if node in seen_through:
            continue
        for source in inputs_of(node):
            readers.setdefault(root[source], []).append(node)
    return readers


def _groups(
    nodes: Sequence[fx.Node], works: dict[fx.Node, Work], seen_through: set[fx.Node], seen_by: dict[fx.Node, bool]
) -> dict[fx.Node, fx.Node]:
    """Fused kernel of each stream node: connected ones of one phase with as many barriers behind them."""
    depth: dict[fx.Node, int] = {}
    parent: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    via: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        level = 0
        for source in inputs_of(node):
            barrier = works[source] in ("matmul", "attention", "attention_backward") or known(source).comm is not None
            level = max(level, depth[source] + (1 if barrier else 0))
        depth[node] = level
        via[node] = node
        if node in seen_through and inputs_of(node):
            via[node] = via[inputs_of(node)[0]]
        if works[node] != "stream" or not seen_by[node]:
            continue
        parent[node] = node
        for source in inputs_of(node):
            base = via[source]
            if base in parent and depth[base] == level and _forward(base) == _forward(node):
                parent[find(node)] = find(base)
    return {node: find(node) for node in parent}


def _forward(node: fx.Node) -> bool:
    return known(node).phase == "forward"


def _dtype(node: fx.Node) -> str:
    """Dtype that the operation computes in: that of its first tensor operand."""
    for source in inputs_of(node):
        for spec in known(source).specs:
            return _name(spec)
    for spec in known(node).specs:
        return _name(spec)
    return "float32"


def _name(spec: Spec) -> str:
    return str(spec.dtype).removeprefix("torch.")


def seconds(kernel: Kernel, device: Device) -> float:
    """Time of one kernel on `device`."""
    node, here = kernel.node, known(kernel.node)
    if kernel.work == "free":
        # what the interpreter dispatches though it moves nothing; a compiler leaves no trace of it
        dispatched = node.op == "call_function" and here.specs and here.comm is None
        return device.view_s if dispatched and not kernel.compiled else 0.0
    if kernel.work == "stream" and not kernel.counts:
        return kernel.moved / (device.memory_bandwidth * device.streaming)
    head_dim = here.specs[0].shape[-1] if kernel.work.startswith("attention") and here.specs else 0
    eager = not kernel.compiled
    return operation(device, kernel.work, kernel.flops, kernel.moved, kernel.dtype, eager=eager, head_dim=head_dim)
