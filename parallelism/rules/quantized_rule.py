"""The rules of quantized weights: `tpshard::dequantize`, and `tpshard::reorder`, which permutes a linear's inputs in
blocks (act-order)."""

from __future__ import annotations

from typing import Any

from tpshard.parallelism.graph import Op, Ref
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.letters import Spelled
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


def dequantize(op: Op) -> Rule:
    """The rule of a weight [o, i] that is made dense. Its inputs are sharded between groups where these are runs of
    inputs, and anywhere between bytes where each input names its group or there is one."""
    groups, ordered = op.operands[1].shape[-1], len(op.operands) > 3
    text = "...ok,...oG,...oG,...(kE)->...o(kE)" if ordered else "...o(gT),...og,...og->...o(gS)"
    if groups == 1 and not ordered:
        text = "...ok,...oG,...oG->...o(kE)"
    return Spelled(op, text, sizes={"G": groups}).rule(priority=0)


OPS: Table = {
    "tpshard.reorder": Entry(reorder, mixes=1),
    "tpshard.dequantize": Entry(dequantize, work="matmul", unpacks=True),  # bound by memory, but a kernel of its own
}
