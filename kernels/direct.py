"""Our operations on a CPU as what they are there, functions, for graphs that are final: a call by way of torch's
dispatcher costs 10 microseconds more, and a decoded token waits for dozens of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from tpshard.kernels.paged_attention import paged_attention_on_cpu
from tpshard.kernels.quantized_ops import matmul_on_cpu
from tpshard.kernels.rows import rms_norm

ON_CPU: dict[Any, Callable[..., Any]] = {
    torch.ops.tpshard.paged_attention.default: paged_attention_on_cpu,
    torch.ops.tpshard.quantized_matmul.default: matmul_on_cpu,
    torch.ops.tpshard.rms_norm_permuted.default: rms_norm,
}


def call_directly(graph: fx.Graph) -> None:
    """Lets a graph that only a CPU will run call these operations without the dispatcher."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in ON_CPU:
            node.target = ON_CPU[node.target]
