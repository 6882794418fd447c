"""The rule of `tpshard::reorder`, which permutes a linear's inputs within blocks (act-order quantization)."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_uppercase
from typing import Any

from tpshard.parallelism.graph import Op, Ref
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.letters import Spelled
from tpshard.parallelism.rules.rule import LocalOp, Rule


def reorder(op: Op) -> Rule:
    """The rule of a permutation within blocks: blocks b may be sharded, positions in a block may not.

    Rows may not be sharded either: in the paper's naive layout every device has all rows of a step, and gathers.
    """
    rows = ascii_uppercase[: op.operands[0].rank - 1]
    spelled = Spelled(op, f"{rows}(bZ),(bZ)->{rows}(bZ)", sizes={"b": op.args[2]})

    def local(at: LocalOp, of: Mapping[str, int]) -> Any:
        return at.with_args(Ref(0), Ref(1), at.size(of["b"]))

    return spelled.rule(local=local)


OPS: Table = {"tpshard.reorder": Entry(reorder, mixes=1)}
