"""Rules of recurrences over a sequence: batch and heads may be sharded, the sequence not."""

from __future__ import annotations

from tpshard.kernels.recurrences.delta_rule import CHUNK as DELTA_TOKENS
from tpshard.kernels.recurrences.selective_scan import CHUNK as SCAN_TOKENS
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.entry import Table
from tpshard.parallelism.rules.letters import letters

DELTA, SCAN = "bThI,bThI,bThO,bThD,bTh,bhIO", "bTd,bTd,dN,bTN,bTN,bdN"
"""The dims of each recurrence's inputs, the state last; see `kernels.delta_rule` and `kernels.selective_scan`."""


def delta_flops(op: Op, first: int = 0) -> int:
    """The FLOPs of the gated delta rule. first: the operand with the queries.

    Per token: products of queries and keys with a chunk's keys, with the values of a chunk, the triangular system's,
    and three products with the state.
    """
    q, v = op.operands[first], op.operands[first + 2]
    (b, t, h, i), o = q.shape, v.shape[3]
    chunk = min(t, DELTA_TOKENS)
    return b * t * h * (4 * chunk * i + 2 * chunk * o + chunk * (i + o) + 6 * i * o)


def scan_flops(op: Op, first: int = 0) -> int:
    """The FLOPs of Mamba's scan: of doubling within a chunk, and of what goes in and out. first: the operand x."""
    x, a = op.operands[first], op.operands[first + 2]
    doublings = (min(x.shape[1], SCAN_TOKENS) - 1).bit_length()
    return x.numel * a.shape[1] * (3 * doublings + 6)


OPS: Table = {
    "tpshard.delta_rule": letters(f"{DELTA}->bThO,bhIO", flops=delta_flops, work="attention", saved=True),
    "tpshard.delta_rule_backward": letters(  # the rule once more, then two products for each
        f"bThO,bhIO,{DELTA}->{DELTA}", flops=lambda op: 3 * delta_flops(op, 2), work="attention_backward", saved=True
    ),
    "tpshard.selective_scan": letters(f"{SCAN}->bTd,bdN", flops=scan_flops, work="stream", saved=True),
    "tpshard.selective_scan_backward": letters(  # the scan once more, one backwards, and the products around them
        f"bTd,bdN,{SCAN}->{SCAN}", flops=lambda op: 3 * scan_flops(op, 2), work="stream", saved=True
    ),
}
