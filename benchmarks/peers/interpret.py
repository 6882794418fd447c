"""Runs a global graph eagerly: what a partitioned program is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tpshard.parallelism.anchors import is_anchor
from tpshard.parallelism.graph import Graph, Ref, Value, map_refs


def evaluate(graph: Graph, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of `graph` on global tensors."""
    tensor_of = dict(zip(graph.inputs, args))
    for op in graph.ops:
        operands = [tensor_of[v] for v in op.operands]
        if is_anchor(op):
            results = operands[0]
        else:

            def operand(ref: Ref, operands: list[torch.Tensor] = operands) -> torch.Tensor:
                return operands[ref.index]

            results = op.target(*(map_refs(a, operand) for a in op.args), **op.kwargs)
        for result, tensor in zip(op.results, results if isinstance(results, (list, tuple)) else [results]):
            tensor_of[result] = tensor
    return [tensor_of[o] for o in graph.outputs if isinstance(o, Value)]
