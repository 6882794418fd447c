"""Stored and used parameters: a parameter and its gradient are stored sharded over the FSDP axis, and used without it.

Propagation excludes the data axes from both used values, or it would gather activations instead; the storage gets the
FSDP axis afterwards. All-gathers and reduce-scatters are then ordinary reshards at the boundaries. (SimpleFSDP,
section 3.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tpshard.parallelism.anchors import is_boundary
from tpshard.parallelism.graph import Graph, Value
from tpshard.parallelism.mesh import Axes, Axis, Mesh, merge, overlap, size_of
from tpshard.parallelism.propagate import propagate
from tpshard.parallelism.propagated import Annotation, Shardings
from tpshard.parallelism.sharding import Layout, Sharding, even
from tpshard.parallelism.why import Told


def boundaries(graph: Graph, kind: str) -> dict[str, tuple[Value, Value]]:
    """For each parameter name, (before, after) of its boundary of kind `parameter` or `gradient`."""
    return {op.args[2]: (op.operands[0], op.results[0]) for op in graph.ops if is_boundary(op) and op.args[1] == kind}


def used_values(graph: Graph) -> dict[str, list[Value]]:
    """For each parameter, the values without data axes: the used one, and the gradient before its storage."""
    found = {name: [after] for name, (_, after) in boundaries(graph, "parameter").items()}
    for name, (before, _) in boundaries(graph, "gradient").items():
        found.setdefault(name, []).append(before)
    return found


def propagate_stored(
    graph: Graph,
    mesh: Mesh,
    annotations: Mapping[Value, Annotation],
    stored: Mapping[str, Sequence[Value]],
    data_axes: Axes,
    fsdp: Axis | None,
    told: tuple[Told, ...],
) -> Shardings:
    """Propagates with `data_axes` excluded from used parameters and gradients, then stores these over `fsdp`.

    stored: for each parameter, the graph inputs with its layout (itself, gradient sums, moments). told: the source of
    the FSDP axis.
    """
    kept_off = frozenset(data_axes) | (frozenset((fsdp,)) if fsdp is not None else frozenset())
    given = dict(annotations)
    ties: list[list[Value]] = []
    for values in used_values(graph).values():
        for value in values:
            known = given.get(value)
            sharding = known.sharding if known is not None else Sharding.unknown(value.rank)
            given[value] = Annotation(
                replace(sharding, replicated=sharding.replicated | kept_off), known.told if known is not None else ()
            )
        if len(values) > 1:
            ties.append(values)
    free = propagate(graph, mesh, given, ties)
    if fsdp is None or fsdp.size == 1:
        return free
    at_rest = [value for values in stored.values() for value in values]
    for value in at_rest:
        layout = storage_layout(value.shape, Layout(free.of[value].dims), fsdp)
        given[value] = Annotation(Sharding(layout.dims, (False,) * value.rank), told)
    for name, (_, after) in boundaries(graph, "gradient").items():
        given[after] = Annotation(given[stored[name][0]].sharding, told)
    final = propagate(graph, mesh, given, ties, free.rules)
    # axes found without the storage keep their reasons; `told` explains only what the storage adds
    for place, found in free.causes.items():
        there = [axis for axis, _ in found]
        final.causes[place] = found + [pair for pair in final.causes.get(place, ()) if not overlap(pair[0], there)]
    return final


def storage_layout(shape: Sequence[int], used: Layout, fsdp: Axis) -> Layout:
    """`used` with `fsdp` appended as the minor-most axis of the first dim that it divides; else of the largest,
    padded."""
    if not shape or overlap(fsdp, used.axes):
        return used
    for d, (size, axes) in enumerate(zip(shape, used.dims)):
        if size % (size_of(axes) * fsdp.size) == 0:
            return _append(used, d, fsdp)
    largest = max(range(len(shape)), key=lambda d: (shape[d] // size_of(used.dims[d]), -d))
    assert even(shape[largest], used.dims[largest])
    return _append(used, largest, fsdp)


def _append(layout: Layout, dim: int, axis: Axis) -> Layout:
    dims = list(layout.dims)
    dims[dim] = merge((*dims[dim], axis))
    return Layout(tuple(dims))
