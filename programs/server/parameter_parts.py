"""Parameters that a server's step reads in parts, such as the gate and up of experts stored as one matrix.

Each part becomes an input of its own: it is sharded as the parameter's dims say, and loaded into its place once. As
slices of one sharded parameter, the parts would move between devices in every step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from tpshard.parallelism.graph import Graph, Op, Value
from tpshard.parallelism.rules.pieces import bounds

aten = torch.ops.aten


@dataclass(frozen=True)
class ParameterPart:
    """Elements [start, start + shape[dim]) along a dim of a parameter."""

    parameter: str
    dim: int
    start: int
    shape: tuple[int, ...]


def cut_parameters(graph: Graph, parameters: Collection[str]) -> dict[str, ParameterPart]:
    """Replaces parameters that are read only as slices along one dim by inputs for these slices; returns the parts by
    the inputs' names."""
    parts: dict[str, ParameterPart] = {}
    inputs: list[Value] = []
    replaced_ops: set[int] = set()
    for value in graph.inputs:
        cuts = [_part(op) for op in value.users] if value.name in parameters else []
        sliced = [part for part in cuts if part is not None]
        if not sliced or len(sliced) < len(cuts) or len({part.dim for part in sliced}) > 1:
            inputs.append(value)
            continue
        slices: dict[str, Value] = {}
        for op, part in zip(list(value.users), sliced):
            name = f"{part.parameter}[{':, ' * part.dim}{part.start}:{part.start + part.shape[part.dim]}]"
            own = slices.setdefault(name, Value(name, part.shape, value.dtype, marked=value.marked))
            graph.replace(op.results[0], own)
            replaced_ops.add(id(op))
            parts[name] = part
        inputs.extend(slices.values())
    graph.inputs, graph.ops = inputs, [op for op in graph.ops if id(op) not in replaced_ops]
    graph.number_inputs()
    return parts


def _part(op: Op) -> ParameterPart | None:
    """The part of a parameter that an op reads; None if it does anything else than take a slice without gaps."""
    if op.target is not aten.slice.Tensor:
        return None
    (value,) = op.operands
    dim, start, _, step = bounds(op, 1)
    return ParameterPart(value.name, dim, start, op.results[0].shape) if step == 1 else None
