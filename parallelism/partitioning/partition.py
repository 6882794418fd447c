"""Partitioning of a function of tensors: capture, propagation and the partitioner, one after the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from tpshard.parallelism.anchors import is_grouped, split_annotations
from tpshard.parallelism.graph import Graph, Value
from tpshard.parallelism.mesh import Mesh, require_mesh
from tpshard.parallelism.partitioning.partitioner import mark_outputs, partition_graph
from tpshard.parallelism.program import Program
from tpshard.parallelism.propagated import Annotation
from tpshard.parallelism.propagation.propagate import propagate
from tpshard.parallelism.resharding.reshard import LATENCY_BYTES
from tpshard.parallelism.rules.control_flow import every_graph
from tpshard.parallelism.sharding import Sharding
from tpshard.parallelism.tracing.capture import capture
from tpshard.parallelism.why import SourcePlace
from tpshard.parallelism.words import unasked_reshards


class ShardingWarning(UserWarning):
    """What a partitioned program does beyond what its annotations ask for."""


def partition(
    fn: Callable[..., Any],
    args: Sequence[Any],
    mesh: Mesh,
    in_shardings: Sequence[Any] | None = None,
    out_shardings: Sequence[Any] | None = None,
    names: Sequence[str] | None = None,
    latency: int = 0,
) -> Program:
    """Partitions any traceable function of tensors (real or meta) into the program of one device.

    in_shardings and out_shardings have an entry per tensor, in the order of the flattened arguments or results: None
    (free), or a tuple (closed) with None, an axis or a tuple of axes per dim; omitted trailing dims are replicated. No
    result is left partial. latency: the cost of starting a collective, in bytes that could be sent meanwhile; 0 counts
    only bytes, and a larger value gathers small tensors rather than sending them in several steps. If the function
    draws random numbers, the program's last input is a `seed` (see `Program.local`), and every mesh draws the same
    numbers. Reshards that no annotation asks for, and work that devices do twice, are `ShardingWarning`s. Raises
    ValueError where a sharding does not fit its tensor or the mesh.
    """
    require_mesh(mesh)
    program = partition_captured(capture(fn, args, names), mesh, in_shardings, out_shardings, latency=latency)
    for sentence in dict.fromkeys([*program.warnings, unasked_reshards(program.collectives)]):
        if sentence:
            warnings.warn(sentence, ShardingWarning, stacklevel=2)
    return program


def partition_captured(
    graph: Graph, mesh: Mesh, in_shardings: Sequence[Any] | None = None, out_shardings: Sequence[Any] | None = None,
    latency: int = LATENCY_BYTES,
) -> Program:  # fmt: skip
    """Partitions a captured (and possibly rewritten) graph into the program of one device; see `partition`."""
    graph, _, _ = graph.copy()
    mark_outputs(graph)
    annotations = {v: one for each in every_graph(graph) for v, one in split_annotations(each, mesh).items()}
    arguments = [v for v in graph.inputs if v is not graph.seed]
    results = [o for o in graph.outputs if isinstance(o, Value)]
    for side, values, shardings in (("in", arguments, in_shardings), ("out", results, out_shardings)):
        if shardings is None:
            continue
        if len(shardings) != len(values):
            raise ValueError(f"{side}_shardings has {len(shardings)} entries for {len(values)} tensors")
        for i, (value, dims) in enumerate(zip(values, shardings)):
            if dims is None:
                continue
            try:
                sharding = Sharding.of(mesh, dims, value.rank)
            except ValueError as error:
                raise ValueError(f"{side}_shardings[{i}] of `{value.name}` {list(value.shape)}: {error}") from error
            annotations[value] = Annotation(sharding, (SourcePlace(f"{side}_shardings[{i}] = {dims!r}"),))
    groups: dict[int, list[Value]] = {}
    for op in (op for each in every_graph(graph) for op in each.ops):
        if is_grouped(op):
            groups.setdefault(op.args[1], []).append(op.results[0])
    return partition_graph(propagate(graph, mesh, annotations, list(groups.values())), latency)
