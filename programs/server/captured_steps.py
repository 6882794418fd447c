"""Which steps of a server a GPU replays as one CUDA graph, in place of launching thousands of kernels."""

from __future__ import annotations

from tpshard.kernels.attention.paged_selection import PAGED_SELECT, PAGED_SELECTED
from tpshard.kernels.experts.quantized_experts import quantized_experts
from tpshard.parallelism.program import Program

MOST_ROWS = 64
"""Most rows of a captured step; larger steps keep the device busy without a graph."""
WAITING = (quantized_experts, PAGED_SELECT, PAGED_SELECTED)
"""Operations that cannot be captured: the host waits for the device to read how many tokens each expert gets, or how
many keys each row of a selection has."""


def can_capture(program: Program) -> bool:
    """Whether a program's step is the same sequence of launches at every call."""
    return not any(node.target in WAITING for node in program.graph.nodes)
