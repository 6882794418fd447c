"""The rule of products in fp8: factors of a contraction whose last summed dim is made of blocks that share a scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from tpshard.kernels.fp8.fp8 import MULTIPLY, QUANTIZE, contraction_of, sizes_of
from tpshard.kernels.fp8.fp8_blocks import BLOCK
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.letters import Spelled
from tpshard.parallelism.rules.rule import LocalOp, Rule

aten = torch.ops.aten


def fp8_product(op: Op) -> Rule:
    """The rule of `bsk,nk->bsn`: as a contraction's, but k is made of blocks, which are summed, and never cut.

    Devices that hold whole blocks quantize them as one device does, so that no collective is needed for scales.
    """
    equation = op.args[2]
    a, b = op.operands
    k = contraction_of(equation).summed[-1]
    spelled = Spelled(op, equation.replace(k, f"({k}{k.upper()})"), sizes={k.upper(): BLOCK})
    return spelled.rule(flops=2 * math.prod(sizes_of(equation, a.shape, b.shape).values()), local=_local)


def _local(at: LocalOp, of: Mapping[str, int]) -> Any:
    """Quantizes both operands along the contraction, each in one kernel, and multiplies them."""
    equation = at.op.args[2]
    contraction = contraction_of(equation)
    parts: list[Any] = []
    for index, side in enumerate(contraction.sides):
        local = dict(zip(equation.split("->")[0].split(",")[index], at.operand_shape(index)))
        rows, summed = (math.prod(local[c] for c in dims) for dims in (side.rows, contraction.summed))
        matrix = (summed, rows) if side.transposed else (rows, summed)
        node = at.inputs[index]
        if at.operand_shape(index) != matrix:
            node = at.emit(aten.reshape.default, node, list(matrix))
        parts += at.several(QUANTIZE, node, side.transposed, work=0.0)
    node = at.emit(MULTIPLY, *parts, dtype=at.dtype(0), work=True)
    return node if at.shape() == at.shape_of(node) else at.emit(aten.reshape.default, node, list(at.shape()))


OPS: Table = {"tpshard.fp8_product": Entry(fp8_product, work="matmul", saved=True)}
