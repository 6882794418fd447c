"""The rule of `tpshard::reorder`, which permutes a linear's inputs within blocks (act-order quantization)."""

from __future__ import annotations

from typing import Any

from tpshard.parallelism.graph import Op, Ref
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.rule import Factors, Kind, LocalOp, Rule


def reorder(op: Op) -> Rule:
    """The rule of a permutation within blocks: blocks b may be sharded, positions s of a block may not.

    `x[... (b s)], order[(b s)] -> [... (b s)]`. Rows may not be sharded either: in the paper's naive layout every
    device has all rows of a step, and gathers. The blocks need not divide a dim that a step has yet to pad, so that
    letters cannot spell it.
    """
    x = op.operands[0]
    blocks = op.args[2]
    factors = Factors()
    rest = factors.dims(x.shape[:-1], Kind.WHOLE)
    b = (factors.new(blocks),) if blocks > 1 else ()
    last = (*b, factors.new(x.shape[-1] // blocks, Kind.WHOLE))

    def local(at: LocalOp) -> Any:
        return at.with_args(Ref(0), Ref(1), at.size(b[0]) if b else 1)

    return factors.rule([(*rest, last), (last,)], [(*rest, last)], local=local, work=b)


OPS: Table = {"tpshard.reorder": Entry(reorder, mixes=1)}
