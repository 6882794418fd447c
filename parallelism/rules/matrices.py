"""Rules of linear algebra and Fourier transforms: matrices and transformed dims are whole, batch dims may be sharded.

An axis on a dim that must be whole moves to a free dim by an all-to-all, if there is one. FLOPs are of leading order
(Golub and Van Loan, "Matrix computations"): a plan warns by them of factorizations that all devices repeat.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.letters import letters, rule_of
from tpshard.parallelism.rules.rule import Rule
from tpshard.parallelism.rules.shape import unlike, whole

aten = torch.ops.aten


def transform(op: Op) -> Rule:
    """The rule of the Fourier transforms _fft_r2c, _fft_c2r and _fft_c2c: the transformed dims are whole.

    A real transform has half of a dim, which is not sharded as the dim is.
    """
    rule, largest = whole(op, op.args[1]), max(op.operands[0].numel, op.results[0].numel)
    length = math.prod(max(op.operands[0].shape[dim], op.results[0].shape[dim]) for dim in op.args[1])
    return replace(rule, blocked=unlike(rule, op), flops=5 * largest * length.bit_length())


def solve(op: Op) -> Rule:
    """The rule of _linalg_solve_ex(A, B, left): the columns of B, if it has any, are independent."""
    a, b = op.operands
    left = op.kwargs.get("left", op.args[2] if len(op.args) > 2 else True)
    right, result = ("...M", "...N") if b.rank < a.rank else ("...Mk", "...Nk") if left else ("...kN", "...kM")
    flops = _cubed(a, 2 / 3) + 2 * b.numel * a.shape[-1]
    return rule_of(op, f"...MN,{right}->{result},...MN,...N,...", same="k", flops=flops)


def solve_triangular(op: Op) -> Rule:
    """The rule of linalg_solve_triangular(A, B, *, upper, left): the columns of B are independent."""
    text = "...MN,...Mk->...Nk" if op.kwargs.get("left", True) else "...MN,...kN->...kM"
    return rule_of(op, text, flops=op.operands[1].numel * op.operands[0].shape[-1])


def lu_solve(op: Op) -> Rule:
    """The rule of linalg_lu_solve(LU, pivots, B, *, left): the columns of B are independent."""
    side = "...Nk" if op.kwargs.get("left", True) else "...kN"
    flops = 2 * op.operands[2].numel * op.operands[0].shape[-1]
    return rule_of(op, f"...MN,...N,{side}->{side}", flops=flops, fills=PIVOTS)


PIVOTS = ((1, 1.0),)
"""The padding of operand 1, which holds pivots: rows counted from 1."""


def _cubed(matrix: Value, times: float) -> int:
    """So many times the product of a matrix's two sizes and its smaller one, of all matrices of a batch."""
    return int(times * matrix.numel * min(matrix.shape[-2:]))


def factorization(text: str, times: float) -> Entry:
    """The entry of an op on one matrix [.., m, n] that takes `times` m n min(m, n) FLOPs."""
    return letters(text, flops=lambda op: _cubed(op.operands[0], times), dense="all")


OPS: Table = {
    aten._fft_r2c: Entry(transform),
    aten._fft_c2r: Entry(transform),
    aten._fft_c2c: Entry(transform),
    aten._linalg_solve_ex: Entry(solve, dense="all"),
    aten.linalg_solve_triangular: Entry(solve_triangular, dense="all"),
    aten.linalg_lu_solve: Entry(lu_solve, dense="all"),
    aten.cholesky_solve: letters(  # the columns of B are independent
        "...Nk,...MN->...Nk", flops=lambda op: 2 * op.operands[0].numel * op.operands[1].shape[-1], dense="all"
    ),
    aten.cholesky_inverse: factorization("...MN->...MN", 2 / 3),
    aten.linalg_inv_ex: factorization("...MN->...NM,...", 2),
    aten.linalg_cholesky_ex: factorization("...MN->...MN,...", 1 / 3),
    aten.linalg_lu_factor_ex: factorization("...MN->...MN,...K,...", 2 / 3),
    aten.geqrf: factorization("...MN->...MN,...K", 4 / 3),
    aten.linalg_lu: factorization("...MN->...AB,...CD,...EF", 2 / 3),
    aten.lu_unpack: letters("...MN,...K->...AB,...CD,...EF", fills=PIVOTS, dense="all"),
    aten.linalg_qr: factorization("...MN->...MA,...BN", 8 / 3),
    aten.linalg_householder_product: factorization("...MN,...K->...MN", 4 / 3),
    aten._linalg_svd: factorization("...MN->...AB,...C,...DE", 20),
    aten._linalg_eigh: factorization("...MN->...N,...MN", 9),
    aten.linalg_eig: factorization("...MN->...N,...MN", 25),
    aten._linalg_eigvals: factorization("...MN->...N", 10),
    aten._linalg_det: factorization("...MN->...,...AB,...K", 2 / 3),
    aten._linalg_slogdet: factorization("...MN->...,...,...AB,...K", 2 / 3),
    aten.linalg_pinv.atol_rtol_tensor: factorization("...MN,...,...->...NM", 24),
    aten.linalg_matrix_exp: factorization("...MN->...MN", 20),
    aten._cdist_forward: letters(
        "...iK,...jK->...ij", flops=lambda op: 3 * op.results[0].numel * op.operands[0].shape[-1]
    ),
    aten._cdist_backward: letters("...ij,...iK,...jK,...ij->...iK", linear="0", dense="all"),
}
