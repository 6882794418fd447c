"""A pass that keeps what the backward pass reads of layers in the host's memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import getitem

from torch import Tensor, fx
from tpshard.parallelism.graph import Layer
from tpshard.parallelism.passes.moves import wait
from tpshard.parallelism.passes.recompute import layer_of, parameter_values
from tpshard.parallelism.pricing.flow import Flow
from tpshard.parallelism.program import INFO, Program, info
from tpshard.parallelism.resharding.new_nodes import call, copy_node
from tpshard.parallelism.transfer import copied, fetch, offload

SMALL = 1 << 10
"""Bytes of a value below which it stays on the device: its copies would take longer than its room is worth."""


def offload_saved(program: Program, first: int | None = None) -> Program:
    """Copies what layers save for the backward pass to the host's memory, and back ahead of its use.

    A layer's copies are issued where the next layer begins, and waited for where the one behind that begins; they come
    back during the backward pass of the next layer. What the last layer saves stays, since it is read at once, and so
    does what all layers read. Of a copy that came back views are taken again. Results do not change by a bit.

    first: of so many layers, from the model's first; None: of all.
    """
    flow, nodes = Flow.of(program), program.nodes
    at = {node: i for i, node in enumerate(nodes)}
    forward, backward = _starts(nodes, backward=False), _starts(nodes, backward=True)
    if not forward:
        return program
    last = next(reversed(forward))
    end = max(i for node, i in at.items() if _phase(node) == "forward" and layer_of(node) == last)
    doors, returns = [*forward.values(), end + 1], [*backward.values()]
    for owner, views in _saved(program, flow).items():
        readers = {user for alias in (owner, *views) for user in alias.users if user.op != "output"}
        behind = {user for user in readers if _phase(user) != "forward"}
        turn = bisect_right(doors, max(at[user] for user in (owner, *(readers - behind)))) - 1
        back = bisect_right(returns, min(at[user] for user in behind)) - 1
        if not 0 <= turn < len(forward) - 1 or back < 1 or (first is not None and turn >= first):
            continue
        away = _copy(offload, owner, nodes[doors[turn + 1]], nodes[doors[turn + 2]])
        here = _copy(fetch, away, nodes[returns[back - 1]], nodes[returns[back]])
        _read_again(owner, here, views, behind, nodes[returns[back]])
    return program


def _read_again(
    owner: fx.Node, here: fx.Node, views: Sequence[fx.Node], readers: Iterable[fx.Node], before: fx.Node
) -> None:
    """Makes readers of a tensor or of its views read those of a copy, which are taken before a node."""
    graph, copies = owner.graph, {owner: here}

    def copy_of(node: fx.Node) -> fx.Node:
        return copies.get(node, node)

    with graph.inserting_before(before):
        for view in views:
            copies[view] = copy_node(graph, view, copy_of)
            place = info(view).place._replace(phase="recompute")
            copies[view].meta[INFO] = replace(info(view), place=place, global_flops=0)
    for reader in readers:
        reader.args = fx.map_arg(reader.args, copy_of)
        reader.kwargs = fx.map_arg(reader.kwargs, copy_of)
    for view in reversed(views):
        for unread in (copies[view], view):
            if not unread.users:
                graph.erase_node(unread)


def _starts(nodes: Sequence[fx.Node], *, backward: bool) -> dict[Layer, int]:
    """Where each layer's forward or backward pass begins, in the order of the graph."""
    starts: dict[Layer, int] = {}
    for i, node in enumerate(nodes):
        if (layer := layer_of(node)) is not None and (_phase(node) != "forward") == backward:
            starts.setdefault(layer, i)
    return starts


def _saved(program: Program, flow: Flow) -> Mapping[fx.Node, Sequence[fx.Node]]:
    """The tensors of the forward pass that the backward pass reads, each with its views in the forward pass."""
    of_parameters = parameter_values(program)
    views: dict[fx.Node, list[fx.Node]] = {}
    read: set[fx.Node] = set()
    for node in flow.nodes:
        owner = node
        while owner in flow.views and owner.target is not wait and not _is_result(owner, flow):
            owner = flow.sources[owner][0]
        if _phase(node) != "forward" or _phase(owner) != "forward" or owner in of_parameters:
            continue
        views.setdefault(owner, []).extend([node] if node is not owner else [])
        if any(_phase(user) not in ("forward", "") for user in node.users):
            read.add(owner)
    tensors = (owner for owner in views if owner in read and len(info(owner).specs) == 1)
    return {owner: views[owner] for owner in tensors if info(owner).bytes >= SMALL}


def _is_result(node: fx.Node, flow: Flow) -> bool:
    """Whether a node selects one of an operation's several results, which are no views of its operand."""
    return node.target is getitem and flow.sources[node][0] not in flow.views


def _phase(node: fx.Node) -> str:
    return info(node).phase if node.op == "call_function" else ""


def _copy(start: Callable[[Tensor], Tensor], source: fx.Node, issued: fx.Node, waited: fx.Node) -> fx.Node:
    """Adds a copy of a value that is issued before one node and waited for before another."""
    graph, one = source.graph, info(source)
    place = one.place._replace(layer=None, phase="forward" if start is offload else "recompute", role="")
    with graph.inserting_before(issued):
        begun = call(graph, start, (source,))
    with graph.inserting_before(waited):
        done = call(graph, copied, (begun, source))
    for node in (begun, done):
        node.meta[INFO] = replace(one, place=place, flops=0, global_flops=0, comm=None, unit="", saved=False)
    return done
