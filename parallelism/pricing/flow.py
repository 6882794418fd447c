"""The data flow of a program: the operands of every node, and which nodes are views of whose storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import fx
from tpshard.parallelism.program import INFO, Info, Program
from tpshard.parallelism.rules.entry import Entry
from tpshard.parallelism.rules.strides import contiguous, same
from tpshard.parallelism.rules.table import entry_of

_EMPTY = Info(())


def op_name(node: fx.Node) -> str:
    """The operation's name without namespace and overload: `mm`, `view`, `all_gather_into_tensor`, ..."""
    return _target_name(node.target)


@cache
def _target_name(target: Any) -> str:
    packet = getattr(target, "overloadpacket", None)
    if packet is not None:
        return str(packet.__name__)
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def info_of(node: fx.Node) -> Info:
    """The `Info` of a node; an empty one if it has none."""
    info = node.meta.get(INFO)
    return info if isinstance(info, Info) else _EMPTY


@dataclass(frozen=True)
class Flow:
    """Facts about all nodes of a program, computed once."""

    nodes: list[fx.Node]
    sources: dict[fx.Node, list[fx.Node]]
    """Operands of each node, each once."""
    info: dict[fx.Node, Info]
    name: dict[fx.Node, str]
    entry: dict[fx.Node, Entry]
    """The entry of each node's operation."""
    bytes: dict[fx.Node, int]
    """Bytes of each node's results on one device."""
    views: set[fx.Node]
    """Nodes whose result shares their first operand's storage."""
    root: dict[fx.Node, fx.Node]
    """The node that owns the storage of each node's result: itself, or the source of a chain of views and waits."""

    @staticmethod
    def of(program: Program) -> Flow:
        return program.cached("flow", lambda: _flow(program.nodes))


def _flow(nodes: list[fx.Node]) -> Flow:
    sources = {node: node.all_input_nodes for node in nodes}
    infos = {node: info_of(node) for node in nodes}
    # targets by identity: the hash of an operation is computed in Python
    targets = {id(node.target): node.target for node in nodes}
    named = {key: _target_name(target) for key, target in targets.items()}
    found = {key: entry_of(target) for key, target in targets.items()}
    names = {node: named[id(node.target)] for node in nodes}
    entries = {node: found[id(node.target)] for node in nodes}
    size = {node: info.bytes for node, info in infos.items()}
    views = _views(nodes, sources, infos, entries)
    root: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        root[node] = root[sources[node][0]] if node in views else node
    return Flow(nodes, sources, infos, names, entries, size, views, root)


def _views(
    nodes: Sequence[fx.Node], sources: dict[fx.Node, list[fx.Node]], infos: dict[fx.Node, Info],
    entries: dict[fx.Node, Entry],
) -> set[fx.Node]:  # fmt: skip
    """The nodes whose results are views. A reshape that cannot be a view copies, as in torch."""
    views: set[fx.Node] = set()
    strides: dict[fx.Node, tuple[int, ...]] = {}  # of non-contiguous values
    for node in nodes:
        view = entries[node].view
        if view is None or node.op != "call_function" or not sources[node]:
            continue
        source = sources[node][0]
        results, operand = infos[node].specs, infos[source].specs
        if view is same or not results or len(operand) != 1:
            views.add(node)
            if source in strides:
                strides[node] = strides[source]
            continue
        before, after = operand[0].shape, results[0].shape
        moved = view(node.args, before, strides.get(source) or contiguous(before), after)
        if moved is None:
            continue
        views.add(node)
        if moved != contiguous(after):
            strides[node] = moved
    return views
