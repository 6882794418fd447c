"""Rules of recurrences over a sequence: batch and heads may be sharded, the sequence not."""

from __future__ import annotations

from dataclasses import replace

from tpshard.kernels.delta_rule import CHUNK as DELTA_TOKENS
from tpshard.kernels.selective_scan import CHUNK as SCAN_TOKENS
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.letters import rule_of
from tpshard.parallelism.rules.rule import Rule

DELTA, SCAN = "bThI,bThI,bThO,bThD,bTh,bhIO", "bTd,bTd,dN,bTN,bTN,bdN"
"""The dims of each recurrence's inputs, the state last; see `kernels.delta_rule` and `kernels.selective_scan`."""


def delta_rule(op: Op) -> Rule:
    """The rule of the gated delta rule.

    FLOPs per token: products of queries and keys with a chunk's keys, with the values of a chunk, the triangular
    system's, and three products with the state.
    """
    return replace(rule_of(op, f"{DELTA}->bThO,bhIO"), flops=_delta_flops(op, 0))


def delta_rule_backward(op: Op) -> Rule:
    """The rule of its gradients: computed once more, then two products for each."""
    return replace(rule_of(op, f"bThO,bhIO,{DELTA}->{DELTA}"), flops=3 * _delta_flops(op, 2))


def _delta_flops(op: Op, first: int) -> int:
    q, v = op.operands[first], op.operands[first + 2]
    (b, t, h, i), o = q.shape, v.shape[3]
    chunk = min(t, DELTA_TOKENS)
    return b * t * h * (4 * chunk * i + 2 * chunk * o + chunk * (i + o) + 6 * i * o)


def selective_scan(op: Op) -> Rule:
    """The rule of Mamba's scan: its FLOPs are those of doubling within a chunk, and of what goes in and out."""
    return replace(rule_of(op, f"{SCAN}->bTd,bdN"), flops=_scan_flops(op, 0))


def selective_scan_backward(op: Op) -> Rule:
    """The rule of its gradients: the scan once more, one backwards, and the products around them."""
    return replace(rule_of(op, f"bTd,bdN,{SCAN}->{SCAN}"), flops=3 * _scan_flops(op, 2))


def _scan_flops(op: Op, first: int) -> int:
    x, a = op.operands[first], op.operands[first + 2]
    doublings = (min(x.shape[1], SCAN_TOKENS) - 1).bit_length()
    return x.numel * a.shape[1] * (3 * doublings + 6)


OPS: Table = {
    "tpshard.delta_rule": Entry(delta_rule, work="attention", saved=True),
    "tpshard.delta_rule_backward": Entry(delta_rule_backward, work="attention_backward", saved=True),
    "tpshard.selective_scan": Entry(selective_scan, work="stream", saved=True),
    "tpshard.selective_scan_backward": Entry(selective_scan_backward, work="stream", saved=True),
}
