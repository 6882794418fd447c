"""Stored and used parameters: a parameter and its gradient are stored sharded over the FSDP axes, used without them.

Propagation excludes the data axes from both used values, or it would gather activations instead; the storage gets the
FSDP axes afterwards. All-gathers and reduce-scatters are then ordinary reshards at the boundaries. (SimpleFSDP,
section 3.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tpshard.parallelism.anchors import is_boundary
from tpshard.parallelism.graph import Graph, Value
from tpshard.parallelism.mesh import Axes, Mesh, merge, overlap, size_of
from tpshard.parallelism.propagated import Annotation, Shardings
from tpshard.parallelism.propagation.propagate import propagate
from tpshard.parallelism.sharding import Layout, Sharding, even
from tpshard.parallelism.why import SourcePlace


def boundaries(graph: Graph, kind: str) -> dict[str, tuple[Value, Value]]:
    """The values before and after each parameter's boundary of kind `parameter` or `gradient`."""
    return {op.args[2]: (op.operands[0], op.results[0]) for op in graph.ops if is_boundary(op) and op.args[1] == kind}


def used_values(graph: Graph) -> dict[str, list[Value]]:
    """Each parameter's values that no data axis may shard: the used parameter, and the gradient before its storage."""
    used = {name: [after] for name, (_, after) in boundaries(graph, "parameter").items()}
    for name, (before, _) in boundaries(graph, "gradient").items():
        used.setdefault(name, []).append(before)
    return used


def propagate_and_store(
    graph: Graph,
    mesh: Mesh,
    annotations: Mapping[Value, Annotation],
    stored: Mapping[str, Sequence[Value]],
    data_axes: Axes,
    fsdp: Axes,
    written_at: tuple[SourcePlace, ...],
) -> Shardings:
    """Propagates with `data_axes` excluded from used parameters and gradients, then stores these over `fsdp`.

    stored: for each parameter, the graph inputs with its layout (itself, gradient sums, moments). written_at: where the
    recipe names the FSDP axes.
    """
    kept_off = frozenset((*data_axes, *fsdp))
    annotated = dict(annotations)
    ties: list[list[Value]] = []
    for values in used_values(graph).values():
        for value in values:
            own = annotated.get(value)
            sharding = own.sharding if own is not None else Sharding.unknown(value.rank)
            annotated[value] = Annotation(
                replace(sharding, replicated=sharding.replicated | kept_off),
                own.written_at if own is not None else (),
            )
        if len(values) > 1:
            ties.append(values)
    free = propagate(graph, mesh, annotated, ties)
    if size_of(fsdp) == 1:
        return free
    at_rest = [value for values in stored.values() for value in values]
    for value in at_rest:
        layout = storage_layout(value.shape, Layout(free.of[value].dims), fsdp)
        annotated[value] = Annotation(Sharding(layout.dims, (False,) * value.rank), written_at)
    for name, (_, after) in boundaries(graph, "gradient").items():
        annotated[after] = Annotation(annotated[stored[name][0]].sharding, written_at)
    final = propagate(graph, mesh, annotated, ties, free.rules)
    # axes found without the storage keep their reasons; `written_at` explains only what the storage adds
    for place, causes in free.causes.items():
        axes = [axis for axis, _ in causes]
        final.causes[place] = causes + [pair for pair in final.causes.get(place, ()) if not overlap(pair[0], axes)]
    return final


def storage_layout(shape: Sequence[int], used: Layout, fsdp: Axes) -> Layout:
    """Appends the axes `fsdp` that a layout does not have: innermost on the first dim that they divide, else on the
    largest, padded. A dim whose shards are not alike is not sharded again: shards of shards would lie elsewhere."""
    fsdp = tuple(axis for axis in fsdp if not overlap(axis, used.axes))
    if not shape or not fsdp:
        return used
    for d, (size, axes) in enumerate(zip(shape, used.dims)):
        if size % (size_of(axes) * size_of(fsdp)) == 0:
            return _append(used, d, fsdp)
    alike = [d for d, axes in enumerate(used.dims) if even(shape[d], axes)]
    if not alike:
        return used
    return _append(used, max(alike, key=lambda d: (shape[d] // size_of(used.dims[d]), -d)), fsdp)


def _append(layout: Layout, dim: int, axes: Axes) -> Layout:
    dims = list(layout.dims)
    dims[dim] = merge((*dims[dim], *axes))
    return Layout(tuple(dims))
