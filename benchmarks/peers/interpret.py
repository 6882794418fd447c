"""Runs a global graph eagerly: what a partitioned program is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tpshard.parallelism.anchors import is_anchor
from tpshard.parallelism.graph import Graph, Ref, Value, map_refs


def evaluate(graph: Graph, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of `graph` on global tensors."""
    known = dict(zip(graph.inputs, args))
    for op in graph.ops:
        operands = [known[v] for v in op.operands]
        if is_anchor(op):
            made = operands[0]
        else:

            def given(ref: Ref, operands: list[torch.Tensor] = operands) -> torch.Tensor:
                return operands[ref.index]

            made = op.target(*(map_refs(a, given) for a in op.args), **op.kwargs)
        for result, tensor in zip(op.results, made if isinstance(made, (list, tuple)) else [made]):
            known[result] = tensor
    return [known[o] for o in graph.outputs if isinstance(o, Value)]
