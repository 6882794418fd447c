"""Collectives that ranks of a CPU carry out as one exchange: each sends to every other at once, and adds up what comes.

gloo's reduce-scatter is an all-reduce of which each rank keeps its part: an exchange sends half as much. Its all-reduce
is a ring of 2 (n - 1) messages that wait for each other; for the few KiB of a decoded token these waits are all that it
takes, and an exchange has one. (What others call a one-shot all-reduce.) Both then sum in rank order, the same bits on
every rank.
"""

from __future__ import annotations

LEAST_BYTES = 32
"""A scalar goes round gloo's ring in one piece, which is as fast."""
MOST_BYTES = 128 << 10
"""Of more than two ranks: of more, the fewer bytes of a ring outweigh its waits, on slow links sooner."""
MOST_SENT = 1 << 20
"""By one rank, to all others together. Two ranks send no more than in a ring, but hold what is sent twice."""


def exchanged(kind: str, buffer: int, members: int) -> bool:
    """Whether a collective whose buffer (see `program.Collective.bytes`) has `buffer` bytes is sent as an all-to-all on
    a CPU."""
    if kind == "reduce_scatter":
        return True
    small = buffer >= LEAST_BYTES and (members - 1) * buffer <= MOST_SENT
    return kind == "all_reduce" and small and (members == 2 or buffer <= MOST_BYTES)


def carried(kind: str, buffer: int, members: int) -> tuple[str, int]:
    """The kind that a collective is on a CPU's wires, and the bytes that a rank hands over for it."""
    if not exchanged(kind, buffer, members):
        return kind, buffer
    return "all_to_all", buffer * (members if kind == "all_reduce" else 1)
