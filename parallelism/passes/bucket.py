"""Bucketing: merges the all-gathers (and reduce-scatters) of several parameters (SimpleFSDP, section 4.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import fx
from tpshard.parallelism.mesh import Axes
from tpshard.parallelism.node_info import shape_of
from tpshard.parallelism.passes.order import NodeOrder
from tpshard.parallelism.program import INFO, Collective, Info, Program, Spec, info
from tpshard.parallelism.resharding.new_nodes import call as add_call

aten = torch.ops.aten
funcol = torch.ops._c10d_functional


def bucket(program: Program, groups: Sequence[Sequence[str]]) -> Program:
    """Merges the parameter and gradient collectives of each group of parameter names into one.

    One all-gather per group, phase, dtype and set of axes; likewise one reduce-scatter and, for replicas, one
    all-reduce of shards. Members keep the group's order, which fixes the order of reduction. Values do not change,
    except for the summation order of low-precision reductions, which the backend chooses by buffer.
    """
    unit = {name: i for i, group in enumerate(groups) for name in group}
    rank = {name: i for i, group in enumerate(groups) for i, name in enumerate(group)}
    names = {i: ", ".join(group) for i, group in enumerate(groups)}
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        sets: dict[tuple[int, str, str, Axes], list[fx.Node]] = {}
        for node, comm in list(program.issues()):
            stored = comm.of in ("parameter", "gradient")
            if comm.kind == kind and stored and len(comm.value) == 1 and comm.value[0] in unit:
                key = (unit[comm.value[0]], info(node).phase, comm.dtype, comm.refs)
                sets.setdefault(key, []).append(node)
        for key, nodes in sets.items():
            if len(nodes) > 1:
                nodes.sort(key=lambda n: rank[info(n).comm.value[0]])  # type: ignore[union-attr]
                _merge(program.graph, nodes, kind, names[key[0]])
    NodeOrder(program.graph).apply()
    return program


def _merge(graph: fx.Graph, nodes: list[fx.Node], kind: str, unit: str) -> None:
    """Replaces collectives of one kind by one over their concatenated tensors, followed by a split."""
    comms = [comm for n in nodes if (comm := info(n).comm) is not None]
    first = info(nodes[0])
    waits = [next(iter(n.users)) for n in nodes]
    n = comms[0].size
    last = max(nodes)  # nodes compare by their position in the graph

    def call(target: Any, args: tuple[Any, ...], shape: tuple[int, ...], comm: Collective | None = None) -> fx.Node:
        node = add_call(graph, target, args)
        spec = Spec(shape, first.specs[0].dtype)
        node.meta[INFO] = Info((spec,), first.origin, first.place, comm=comm, unit=unit)
        return node

    lengths = [math.prod(shape_of(node.args[0])) // (n if kind == "reduce_scatter" else 1) for node in nodes]
    total = sum(lengths)
    joined = replace(
        comms[0],
        bytes=sum(c.bytes for c in comms),
        value=tuple(name for c in comms for name in c.value),
        why=tuple(demand for c in comms for demand in c.why),
    )
    with graph.inserting_after(last):
        anchor = graph.call_function(len)  # a position to insert before; erased below
    # the buffer of a reduce-scatter is [n, total] before it, that of an all-gather after it
    before, after = ((n,) if kind == side else () for side in ("reduce_scatter", "all_gather"))
    with graph.inserting_before(anchor):
        flat = [
            call(aten.reshape.default, (node.args[0], [*before, k]), (*before, k)) for node, k in zip(nodes, lengths)
        ]
        packed = call(aten.cat.default, (flat, len(before)), (*before, total))
        if before:
            packed = call(aten.reshape.default, (packed, [n * total]), (n * total,))
        length = math.prod((*after, total))
        started = call(nodes[0].target, (packed, *nodes[0].args[1:]), (length,), joined)
        done = call(funcol.wait_tensor.default, (started,), (length,))
        if after:
            done = call(aten.reshape.default, (done, [n, total]), (n, total))
        parts = call(aten.split_with_sizes.default, (done, lengths, len(after)), ())
        parts.meta[INFO] = replace(info(parts), specs=tuple(Spec((*after, k), first.specs[0].dtype) for k in lengths))
        for i, (wait, node) in enumerate(zip(waits, nodes)):
            one = call(getitem, (parts, i), (*after, lengths[i]))
            wait.replace_all_uses_with(call(aten.reshape.default, (one, list(shape_of(node))), shape_of(node)))
    graph.erase_node(anchor)
    for wait, node in zip(waits, nodes):
        graph.erase_node(wait)
        graph.erase_node(node)
