"""Rules of recurrent layers' states in a server's pools: a state may be sharded along its dims, sequences may not."""

from __future__ import annotations

from tpshard.parallelism.rules.entry import Table
from tpshard.parallelism.rules.letters import letters

OPS: Table = {
    # the pool, the states' numbers and the rows' positions; or the pool, the numbers and what is written
    "tpshard.read_state": letters("N...,M,BR->M...", lookup=True),
    "tpshard.write_state": letters("N...,M,M...->M", same="...", overwrites=True),
}
