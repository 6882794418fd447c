"""Adding nodes to graphs of programs, and copying them, as `fx.Graph` does but in a third of the time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

from torch import fx

_set_args, _set_kwargs = fx.Node.args.fset, fx.Node.kwargs.fset  # type: ignore[attr-defined]
_NO_KEYWORDS: dict[str, Any] = fx.immutable_collections.immutable_dict()


def copy_node(graph: fx.Graph, node: fx.Node, copy_of: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """Copies a node to the insertion point of a graph; `copy_of` gives the copies of its operands."""
    copy = _add(graph, node.op, node.target, node.name, node.type)
    set_operands(copy, fx.map_arg(node.args, copy_of), fx.map_arg(node.kwargs, copy_of))
    copy.meta.update(node.meta)
    return copy


def identifier(name: str) -> str:
    """A parameter's name as an argument of Python: all but letters and digits replaced, and a digit not in front, where
    the first layer of an `nn.Sequential` has it."""
    cleaned = "".join(c if c.isalnum() else "_" for c in name)
    return f"_{cleaned}" if cleaned[:1].isdigit() else cleaned


def call(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
    """Adds a node that calls `target`, as `fx.Graph.call_function` does."""
    node = _add(graph, "call_function", target, _name_of(target))
    set_operands(node, args, kwargs or {})
    return node


def set_operands(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Sets the arguments of a node that has none yet.

    Given to `fx.Graph.create_node` they would be searched for symbolic sizes, which programs do not have; assigned to
    the node's attributes, it would be entered again in the graph's index of operations.
    """
    if args:
        _set_args(node, args)
    if kwargs:
        _set_kwargs(node, dict(kwargs))


def _add(graph: fx.Graph, op: str, target: Any, name: str, result: Any = None) -> fx.Node:
    """Adds a node without arguments. A number behind its name keeps it apart from others, as in fx."""
    names = graph._graph_namespace
    base, number = _split(name)
    if number is None or name in names._used_names:
        name = names.create_name(name, None)
    else:
        names._used_names.add(name)
        names._base_count[base] = number
    node = fx.Node(graph, name, op, target, (), _NO_KEYWORDS, result)
    names._obj_to_name[node] = name
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


@lru_cache(100_000)
def _split(name: str) -> tuple[str, int | None]:
    """A name that fx gave without the number behind it, and the number; None for one that fx has to look at."""
    match = re.fullmatch(r"([a-zA-Z_][0-9a-zA-Z_]*?)_(\d+)", name)
    return (match[1], int(match[2])) if match is not None else (name, None)


@cache
def _name_of(target: Any) -> str:
    """The name that fx gives the calls of an operation."""
    return fx.Graph()._target_to_str(target)
