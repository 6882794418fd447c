"""Which steps of a server a GPU replays as one CUDA graph, in place of launching thousands of kernels."""

from __future__ import annotations

from tpshard.kernels.attention.paged_selection import PAGED_SELECT, PAGED_SELECTED
from tpshard.parallelism.program import Program

MOST_ROWS = 128
"""Most rows of a captured step: a server's second size. Larger steps keep the device busy without a graph."""
WAITING = (PAGED_SELECT, PAGED_SELECTED)
"""Operations that cannot be captured: the host waits for the device to read how many keys each row of a selection
has."""
APART = "experts apart"
"""The form of quantized experts that are multiplied one after the other, for which the host reads each one's tokens."""


def can_capture(program: Program) -> bool:
    """Whether a program's step is the same sequence of launches at every call on a GPU."""
    apart = any(port.held is not None and port.held.form == APART for port in program.inputs)
    return not apart and not any(node.target in WAITING for node in program.graph.nodes)
