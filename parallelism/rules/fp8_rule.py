"""The rule of products in fp8: factors of a contraction whose last summed dim is made of blocks that share a scale."""

from __future__ import annotations

from typing import Any

import torch
from tpshard.kernels.fp8 import MULTIPLY, QUANTIZE, VALUES, contraction_of, sizes_of
from tpshard.kernels.fp8_blocks import BLOCK
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule, product

aten = torch.ops.aten


def fp8_product(op: Op) -> Rule:
    """The rule of `bsk,nk->bsn`: as a contraction's, but k is made of blocks, which are summed, and never cut.

    Devices that hold whole blocks quantize them as one device does, so that no collective is needed for scales.
    """
    equation = op.args[2]
    a, b = op.operands
    contraction = contraction_of(equation)
    sizes = sizes_of(equation, a.shape, b.shape)
    factors = Factors()
    dims: dict[str, Dim] = {}
    for c, size in sizes.items():
        kind = Kind.REDUCE if c in contraction.summed else Kind.PASS
        blocked = c == contraction.summed[-1]
        dims[c] = (factors.new(size // BLOCK if blocked else size, kind),)
        if blocked:
            dims[c] += (factors.new(BLOCK, Kind.WHOLE),)
    inputs, out = equation.split("->")
    return factors.rule(
        [tuple(dims[c] for c in letters) for letters in inputs.split(",")],
        [tuple(dims[c] for c in out)],
        flops=2 * product(list(sizes.values())),
        work=tuple(dim[0] for dim in dims.values()),
        local=_local,
    )


def _local(at: LocalOp) -> Any:
    """Quantizes both operands along the contraction, each in one kernel, and multiplies them."""
    equation, wide = at.op.args[2], torch.promote_types(at.op.operands[0].dtype, torch.float32)
    contraction = contraction_of(equation)
    parts: list[Any] = []
    shape = []
    for index, side in enumerate(contraction.sides):
        letters = equation.split("->")[0].split(",")[index]
        local = dict(zip(letters, at.operand_shape(index)))
        rows, summed = (product([local[c] for c in dims]) for dims in (side.rows, contraction.summed))
        matrix = (summed, rows) if side.transposed else (rows, summed)
        node = at.inputs[index]
        if at.operand_shape(index) != matrix:
            node = at.emit(aten.reshape.default, node, list(matrix), shape=matrix)
        like = [((rows, summed), VALUES), ((summed // BLOCK, rows), wide)]
        parts += at.several(QUANTIZE, node, side.transposed, like=like, work=0.0)
        shape.append(rows)
    node = at.emit(MULTIPLY, *parts, shape=shape, dtype=at.dtype(0), work=True)
    return (
        node if at.shape() == tuple(shape) else at.emit(aten.reshape.default, node, list(at.shape()), shape=at.shape())
    )


OPS: Table = {"tpshard.fp8_product": Entry(fp8_product, work="matmul", saved=True)}
