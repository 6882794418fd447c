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
"""Where messages of 4 and 8 ranks took as long in the ring as in the exchange, at 1 to 10 Gbit/s a host."""
MOST_SENT = 1 << 20
"""By one rank, to all others together."""


def exchanged(kind: str, buffer: int, members: int) -> bool:
    """Whether a collective whose buffer (see `program.Collective.bytes`) has `buffer` bytes is sent as an all-to-all on
    a CPU. Between two ranks the ring of an all-reduce has as many waits as an exchange has messages."""
    if kind == "reduce_scatter":
        return True
    small = LEAST_BYTES <= buffer <= MOST_BYTES and (members - 1) * buffer <= MOST_SENT
    return kind == "all_reduce" and members > 2 and small
