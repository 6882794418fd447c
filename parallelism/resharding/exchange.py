"""Collectives that CPU ranks run as one all-to-all with a local sum (a one-shot all-reduce or reduce-scatter).

gloo's reduce-scatter is an all-reduce of which each rank keeps its part: an exchange sends half as much. Its all-reduce
is a ring of 2 (n - 1) dependent messages; for the few KiB of a decoded token this latency dominates, and an exchange
has one round. Both sum in rank order, so that every rank gets the same bits.
"""

from __future__ import annotations

LEAST_BYTES = 32
"""Bytes below which gloo sends an all-reduce in one piece, which is as fast as an exchange."""
MOST_BYTES = 128 << 10
"""Bytes above which, with more than two ranks, a ring is faster: it sends less, which outweighs its latency."""
MOST_SENT = 1 << 20
"""The most bytes that one rank may send to all others together. Two ranks send no more than a ring, but hold the data
twice."""


def runs_as_exchange(kind: str, buffer: int, members: int) -> bool:
    """Whether a CPU runs a collective as an all-to-all with a local sum.

    buffer: its bytes, as in `program.Collective.bytes`.
    """
    if kind == "reduce_scatter":
        return True
    small = buffer >= LEAST_BYTES and (members - 1) * buffer <= MOST_SENT
    return kind == "all_reduce" and small and (members == 2 or buffer <= MOST_BYTES)


def cpu_collective(kind: str, buffer: int, members: int) -> tuple[str, int]:
    """The kind of collective that CPU ranks run in place of `kind`, and the bytes of a rank's input to it."""
    if not runs_as_exchange(kind, buffer, members):
        return kind, buffer
    return "all_to_all", buffer * (members if kind == "all_reduce" else 1)
