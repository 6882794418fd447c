"""Rules of recurrent layers' states in a server's pools: a state may be sharded along its dims, sequences may not."""

from __future__ import annotations

from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.rule import Factors, Kind, Rule


def read_state(op: Op) -> Rule:
    """`pool[n ...], states[m], positions[1 rows] -> [m ...]`, with n, m and rows whole."""
    factors = Factors()
    state, many, n, rows = _dims(op, factors)
    return factors.rule([((n,), *state), ((many,),), ((), (rows,))], [((many,), *state)])


def write_state(op: Op) -> Rule:
    """`pool[n ...], states[m], values[m ...] -> [m]`: every device writes its part of the states."""
    factors = Factors()
    state, many, n, _ = _dims(op, factors)
    return factors.rule([((n,), *state), ((many,),), ((many,), *state)], [((many,),)])


def _dims(op: Op, factors: Factors) -> tuple[tuple[tuple[int, ...], ...], int, int, int]:
    """The dims of a state, and the factors of the step's sequences, of the pool's states and of the rows."""
    pool, states, last = op.operands
    many, n = (factors.new(value.shape[0], Kind.WHOLE) for value in (states, pool))
    return factors.dims(pool.shape[1:]), many, n, factors.new(last.shape[-1], Kind.WHOLE)


OPS: Table = {
    "tpshard.read_state": Entry(read_state, lookup=True),
    "tpshard.write_state": Entry(write_state, overwrites=True),
}
