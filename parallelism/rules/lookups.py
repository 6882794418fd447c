"""Rules of ops that look up positions of a dim which must be whole: searchsorted, embedding_bag."""

from __future__ import annotations

import torch
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.letters import letters, rule_of
from tpshard.parallelism.rules.rule import Rule, whole

aten = torch.ops.aten


def search_sorted(op: Op) -> Rule:
    """The rule of searchsorted(sorted, values): values may be sharded, since each is searched separately."""
    alone = op.operands[0].rank == 1
    return rule_of(op, "N,...->..." if alone else "...N,...m->...m")


def bags(op: Op) -> Rule:
    """The rule of _embedding_bag(weight, indices, offsets, ...): only the width may be sharded.

    The results are the bags, the bag of every lookup, and the size and the maximum of every bag.
    """
    largest = "Bd" if op.results[3].rank == 2 else "L"
    return rule_of(op, f"Vd,I,O,I->Bd,X,Y,{largest}", same="d")


def bags_backward(op: Op) -> Rule:
    """The rule of _embedding_bag_backward: only the width may be sharded.

    The operands are the gradient, indices, offsets, the bag of every lookup, the bags' sizes and maxima, and weights.
    """
    if len(op.operands) < 6:
        return whole(op)
    largest = "Bd" if op.operands[5].rank == 2 else "L"
    return rule_of(op, f"Bd,I,O,X,Y,{largest},W->Vd")


OPS: Table = {
    aten.searchsorted: Entry(search_sorted, dense="all"),
    aten._embedding_bag: Entry(bags, dense="all"),
    aten._embedding_bag_forward_only: Entry(bags, dense="all"),
    aten._embedding_bag_backward: Entry(bags_backward, dense="all"),
    aten._embedding_bag_per_sample_weights_backward: letters("Bd,Vd,I,O,X->I", dense="all"),
}
