"""Where the values of a program lie: operands of every node, which results are views, whose storage they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import fx
from tpshard.parallelism.program import INFO, Info, Program

_VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "detach",
    "alias", "unflatten", "flatten", "split", "split_with_sizes", "chunk", "unbind", "name", "getitem", "as_strided",
    "wait_tensor", "narrow", "reshape", "view_as", "lift_fresh", "expand_as", "_getitem", "named", "boundary",
}  # fmt: skip
_SELECTING = {"getitem", "_getitem", "wait_tensor", "name", "named", "boundary", "detach", "alias", "lift_fresh"}
_EMPTY = Info(())


def op_name(node: fx.Node) -> str:
    """`mm`, `view`, `all_gather_into_tensor`, ...: the operation without namespace and overload."""
    return _target_name(node.target)


@cache
def _target_name(target: Any) -> str:
    packet = getattr(target, "overloadpacket", None)
    if packet is not None:
        return str(packet.__name__)
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def known(node: fx.Node) -> Info:
    """A node's `Info`, or an empty one."""
    found = node.meta.get(INFO)
    return found if isinstance(found, Info) else _EMPTY


@dataclass(frozen=True)
class Flow:
    """What is asked of every node again and again, found once for a program."""

    nodes: list[fx.Node]
    sources: dict[fx.Node, list[fx.Node]]
    """Operands, each once."""
    info: dict[fx.Node, Info]
    name: dict[fx.Node, str]
    bytes: dict[fx.Node, int]
    """Of a node's results, on one device."""
    views: set[fx.Node]
    """Nodes whose result lies in their first operand's storage."""
    root: dict[fx.Node, fx.Node]
    """The node whose storage a node's result lies in: itself, or the source of a chain of views and waits."""

    @staticmethod
    def of(program: Program) -> Flow:
        return program.derived("flow", lambda: _flow(program.nodes))


def _flow(nodes: list[fx.Node]) -> Flow:
    sources = {node: node.all_input_nodes for node in nodes}
    infos = {node: known(node) for node in nodes}
    names = {node: op_name(node) for node in nodes}
    size = {node: here.bytes for node, here in infos.items()}
    views = _views(nodes, sources, infos, names)
    root: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        root[node] = root[sources[node][0]] if node in views else node
    return Flow(nodes, sources, infos, names, size, views, root)


def _views(
    nodes: Sequence[fx.Node], sources: dict[fx.Node, list[fx.Node]], infos: dict[fx.Node, Info],
    names: dict[fx.Node, str],
) -> set[fx.Node]:  # fmt: skip
    """A reshape that cannot be a view copies, as in torch."""
    found: set[fx.Node] = set()
    strides: dict[fx.Node, tuple[int, ...]] = {}  # of what is not contiguous
    for node in nodes:
        name = names[node]
        if name not in _VIEWS or node.op != "call_function" or not sources[node]:
            continue
        source = sources[node][0]
        here, there = infos[node].specs, infos[source].specs
        if name in _SELECTING or not here or len(there) != 1:
            found.add(node)
            if source in strides:
                strides[node] = strides[source]
            continue
        before, after = there[0].shape, here[0].shape
        moved = _view(node, name, before, strides.get(source) or contiguous(before), after)
        if moved is None:
            continue
        found.add(node)
        if moved != contiguous(after):
            strides[node] = moved
    return found


@cache
def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= size
    return tuple(reversed(out))


def _view(
    node: fx.Node, name: str, before: tuple[int, ...], strides: tuple[int, ...], after: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Strides of a view; None where the operation has to copy."""
    args = node.args
    if name == "permute":
        return tuple(strides[d] for d in args[1])  # type: ignore[union-attr, index, misc]
    if name in ("transpose", "t"):
        order = list(strides)
        first, second = (args[1], args[2]) if name == "transpose" else (0, len(order) - 1)
        order[first], order[second] = order[second], order[first]  # type: ignore[index]
        return tuple(order)
    if name == "expand":
        pad = len(after) - len(before)
        old = (1,) * pad + before
        full = (0,) * pad + strides
        return tuple(0 if o == 1 and n != 1 else s for o, n, s in zip(old, after, full))
    if name in ("slice", "narrow", "split", "split_with_sizes", "chunk") and len(before) == len(after):
        return strides
    if name in ("reshape", "view", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten"):
        return reshaped(before, strides, after)
    return contiguous(after)


@cache
def reshaped(before: tuple[int, ...], strides: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...] | None:
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
