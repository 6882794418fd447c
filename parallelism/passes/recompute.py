"""Recomputation of forward values in the backward pass (Chen et al. 2016; SimpleFSDP, section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from operator import getitem

import torch
from torch import fx
from tpshard.diagnostics.patterns import covers
from tpshard.parallelism.graph import Layer
from tpshard.parallelism.program import INFO, Program, info
from tpshard.parallelism.resharding.new_nodes import copy_node
from tpshard.parallelism.rules.table import entry_of

MM = torch.ops.aten.mm.default
LOW = 8
"""How many times as large as the dim of its sums the result of a low-rank product is."""
Keep = Callable[[fx.Node], bool]
"""A function that decides whether to save a forward value which the backward pass reads."""


def recompute(program: Program, keep: Keep, reshard_after_forward: bool = True, cut: bool = False) -> Program:
    """Makes the backward pass recompute every forward value that `keep` does not save, from those that are saved.

    With `reshard_after_forward` gathered parameters are not saved: the whole chain (cast, all-gather, wait, views) is
    repeated, as in SimpleFSDP; weights that were unpacked never are. Those that the forward pass reads behind the last
    layer, such as the head's, are: the backward pass begins with them; not where it will be `cut` into programs of
    stages, which would save them for every micro-batch. Recomputed nodes have the phase `recompute`; later passes
    decide their position.
    Results do not change by a bit.
    """
    graph = program.graph
    gathered = parameter_values(program)
    if not cut:
        gathered -= _read_last(program, gathered)
    forward = [n for n in graph.nodes if n.op == "call_function" and info(n).phase == "forward"]
    dense = _unpacked(forward, parameter_values(program))
    again = {node for node in forward
             if node in dense or (reshard_after_forward if node in gathered else not keep(node))}  # fmt: skip
    position = {node: i for i, node in enumerate(graph.nodes)}
    clones: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or info(node).phase != "backward":
            continue
        repeated = [operand for operand in node.all_input_nodes if operand in again]
        if not repeated:
            continue
        for operand in repeated:
            _clone_before(graph, operand, node, again, clones, position)
        node.args = fx.map_arg(node.args, lambda n: clones.get(n, n) if n in again else n)
        node.kwargs = fx.map_arg(node.kwargs, lambda n: clones.get(n, n) if n in again else n)
    return program


def _unpacked(forward: Iterable[fx.Node], gathered: Collection[fx.Node]) -> set[fx.Node]:
    """Values of parameters that were unpacked, and their views."""
    dense: set[fx.Node] = set()
    for node in forward:
        if node in gathered and (entry_of(node.target).unpacks or not dense.isdisjoint(node.all_input_nodes)):
            dense.add(node)
    return dense


def _read_last(program: Program, gathered: Collection[fx.Node]) -> set[fx.Node]:
    """Values of parameters that the forward pass reads behind the last layer; none for a program without layers."""
    last, forward = False, [n for n in program.graph.nodes if n.op == "call_function" and info(n).phase == "forward"]
    kept: set[fx.Node] = set()
    for node in reversed(forward):
        last = last or (layer_of(node) is not None and node not in gathered)
        if node in gathered:
            kept |= {node} if not kept.isdisjoint(node.users) else set()
        elif not last:
            kept |= {operand for operand in node.all_input_nodes if operand in gathered}
    return kept if last else set()


def _clone_before(
    graph: fx.Graph,
    node: fx.Node,
    reader: fx.Node,
    again: Collection[fx.Node],
    clones: dict[fx.Node, fx.Node],
    position: dict[fx.Node, int],
) -> None:
    """Clones `node`, and the nodes of `again` that it depends on, before `reader`."""
    chain: list[fx.Node] = []
    queue = [node]
    visited: set[fx.Node] = set()
    while queue:
        current = queue.pop()
        if current in clones or current in visited:
            continue
        visited.add(current)
        chain.append(current)
        queue.extend(operand for operand in current.all_input_nodes if operand in again)
    with graph.inserting_before(reader):
        for current in sorted(chain, key=position.__getitem__):
            copy = copy_node(graph, current, lambda n: clones.get(n, n))
            metadata = info(current)
            # repeated work counts for the device, but not as useful work of the model
            copy.meta[INFO] = replace(metadata, place=metadata.place._replace(phase="recompute"), global_flops=0)
            clones[current] = copy


def parameter_values(program: Program) -> set[fx.Node]:
    """The forward nodes computed from parameters and constants alone: casts, all-gathers, their waits, and views."""
    kinds = [port.kind for port in program.inputs]
    feeds = [n for n in program.graph.nodes if n.op == "placeholder"]
    pure = {feed for feed, kind in zip(feeds, kinds) if kind == "parameter"}
    fixed: set[fx.Node] = set()
    values: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "get_attr":
            fixed.add(node)
        if node.op != "call_function" or info(node).phase != "forward":
            continue
        if all(n in fixed for n in node.all_input_nodes):
            fixed.add(node)
        elif all(n in pure or n in fixed for n in node.all_input_nodes):
            pure.add(node)
            values.add(node)
    return values


# ---- what to keep ------------------------------------------------------------------------------------------------
def layer_of(node: fx.Node) -> Layer | None:
    """The layer of a node; None outside of layers."""
    return info(node).place.layer if node.op == "call_function" else None


def leaves_layer(node: fx.Node) -> bool:
    """Whether the forward pass reads a node's result in another layer."""
    return any(layer_of(user) != layer_of(node) for user in node.users if info(user).phase == "forward")


def keep_all(node: fx.Node) -> bool:
    """A `Keep` that saves every value (remat: none)."""
    return True


def keep_layer_inputs(every: int = 1, first: int | None = None, modules: Collection[str] = ()) -> Keep:
    """A `Keep` that saves only the input of every n-th layer, of all or of the first (remat: full, {every: n} or
    {first: n}); with patterns of `modules`, all that is computed outside of these."""

    def keep(node: fx.Node) -> bool:
        layer = layer_of(node)
        if layer is None or layer.number % every or (first is not None and layer.number >= first):
            return True
        if modules:
            return not any(covers(pattern, info(node).module) for pattern in modules)
        return leaves_layer(node)

    return keep


def keep_selected(names: Collection[str] = ()) -> Keep:
    """A `Keep` that saves outputs of products and attention, and communicated values (remat: selective, or a list).

    names: operations (`mm`, `attention`), or the modules whose product is saved (`wq`, `gate`). Without them the large
    products of a low rank, such as an adapter's, are computed again from the small ones, which costs little.
    """

    def keep(node: fx.Node) -> bool:
        if layer_of(node) is None or leaves_layer(node):
            return True
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source.op != "call_function":
            return is_selected(node)
        part_of_selected = node.target is getitem and is_selected(source)
        return info(source).comm is not None or part_of_selected or is_selected(node)

    def is_selected(node: fx.Node) -> bool:
        return info(node).saved and not (is_low_rank(node) if not names else names_of(node).isdisjoint(names))

    return keep


def is_low_rank(node: fx.Node) -> bool:
    """Whether a node is a product with a matrix over a dim that is at most an eighth of its result's last one."""
    if node.target is not MM:
        return False
    shape = info(node).specs[0].shape
    return 0 < info(node).flops * LOW <= 2 * math.prod(shape) * shape[-1]


def names_of(node: fx.Node) -> set[str]:
    """The names that select a node in `keep_selected`: its operation's and its module's, whole and short."""
    target, module = str(getattr(node.target, "overloadpacket", node.target)), info(node).module
    return {target, target.rpartition(".")[2], module, module.rpartition(".")[2]}


def selectable(program: Program) -> set[str]:
    """All names that select a value of a program in `keep_selected`."""
    calls = (node for node in program.graph.nodes if node.op == "call_function")
    return {name for node in calls if layer_of(node) and info(node).saved for name in names_of(node) if name}
