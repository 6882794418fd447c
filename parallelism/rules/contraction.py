"""Rules of matrix products: contractions over any number of dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.decompositions import addmm
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.rule import Factors, Kind, LocalOp, Rule

aten = torch.ops.aten


def contract(a: Any, b: Any, equation: str) -> Any:
    """The contraction `torch.einsum(equation, a, b)`, an op that exists only in the global graph."""
    return torch.einsum(equation, a, b)


def contraction(op: Op, equation: str) -> Rule:
    """The rule of an equation such as `bsk,nk->bsn`: letters are factors, those not in the result are summed."""
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    a, b = op.operands
    size = dict(zip(left + right, a.shape + b.shape))
    factors = Factors()
    factor = {c: factors.new(n, Kind.PASS if c in out else Kind.REDUCE) for c, n in size.items()}
    return factors.rule(
        [tuple((factor[c],) for c in left), tuple((factor[c],) for c in right)],
        [tuple((factor[c],) for c in out)],
        flops=2 * math.prod(size.values()),
        work=tuple(factor.values()),
        local=lambda local: product_of(local, equation),
    )


def product_of(local: LocalOp, equation: str) -> Any:
    """Lowers an equation to views and one mm (or bmm), in the arrangement with the fewest copies."""
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    batch = [c for c in out if c in left and c in right]
    rows = [c for c in out if c in left and c not in right]
    columns = [c for c in out if c in right and c not in left]
    summed = [c for c in left if c not in out]
    size = dict(zip(left + right, local.operand_shape(0) + local.operand_shape(1)))

    def permute(node: Any, letters: Sequence[str], wanted: Sequence[str]) -> Any:
        order = [letters.index(c) for c in wanted]
        return node if order == sorted(order) else local.emit(aten.permute.default, node, order)

    def reshape(node: Any, *dims: list[str]) -> Any:
        shape = tuple(math.prod(size[c] for c in letters) for letters in dims)
        return node if local.shape_of(node) == shape else local.emit(aten.reshape.default, node, list(shape))

    lead = [batch] if batch else []
    x = reshape(permute(local.inputs[0], left, batch + rows + summed), *lead, rows, summed)
    y = reshape(permute(local.inputs[1], right, batch + summed + columns), *lead, summed, columns)
    node = local.emit(aten.bmm.default if batch else aten.mm.default, x, y, work=True)
    computed = batch + rows + columns
    return permute(reshape(node, *([c] for c in computed)), computed, out)


def einsum(equation: str, **facts: Any) -> Entry:
    """The entry of a product of two operands; of an op with three operands, the first is added to the product."""
    rule = partial(contraction, equation=equation)
    return Entry(rule, equation=equation, work="matmul", saved=True, commutes=True, **facts)


OPS: Table = {
    contract: Entry(lambda op: contraction(op, op.args[2]), work="matmul", saved=True, commutes=True),
    aten.mm: einsum("mk,kn->mn"),
    aten.addmm: einsum("mk,kn->mn", recorded=addmm, adds=True),
    aten.bmm: einsum("bmk,bkn->bmn"),
    aten.baddbmm: einsum("bmk,bkn->bmn", recorded="decomposed", adds=True),
    aten.mv: einsum("mk,k->m"),
    aten.dot: einsum("k,k->"),
}
