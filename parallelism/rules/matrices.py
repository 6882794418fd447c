"""Rules of linear algebra and Fourier transforms: matrices and transformed dims are whole, batch dims may be sharded.

An axis on a dim that must be whole moves to a free dim by an all-to-all, if there is one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.letters import letters, rule_of
from tpshard.parallelism.rules.rule import Rule
from tpshard.parallelism.rules.shape import unlike, whole

aten = torch.ops.aten


def transform(op: Op) -> Rule:
    """The rule of the Fourier transforms _fft_r2c, _fft_c2r and _fft_c2c: the transformed dims are whole.

    A real transform has half of a dim, which is not sharded as the dim is.
    """
    rule = whole(op, op.args[1])
    return replace(rule, blocked=unlike(rule, op))


def solve(op: Op) -> Rule:
    """The rule of _linalg_solve_ex(A, B, left): the columns of B, if it has any, are independent."""
    a, b = op.operands
    left = op.kwargs.get("left", op.args[2] if len(op.args) > 2 else True)
    right, result = ("...M", "...N") if b.rank < a.rank else ("...Mk", "...Nk") if left else ("...kN", "...kM")
    return rule_of(op, f"...MN,{right}->{result},...MN,...N,...", same="k")


def solve_triangular(op: Op) -> Rule:
    """The rule of linalg_solve_triangular(A, B, *, upper, left): the columns of B are independent."""
    return rule_of(op, "...MN,...Mk->...Nk" if op.kwargs.get("left", True) else "...MN,...kN->...kM")


def lu_solve(op: Op) -> Rule:
    """The rule of linalg_lu_solve(LU, pivots, B, *, left): the columns of B are independent."""
    side = "...Nk" if op.kwargs.get("left", True) else "...kN"
    return _with_pivots(rule_of(op, f"...MN,...N,{side}->{side}"))


def lu_unpack(op: Op) -> Rule:
    """The rule of lu_unpack(LU, pivots): batch dims are independent."""
    return _with_pivots(rule_of(op, "...MN,...K->...AB,...CD,...EF"))


def _with_pivots(rule: Rule) -> Rule:
    """The rule of an op whose operand 1 holds pivots: rows counted from 1, in the padding too."""
    return replace(rule, fills=((1, 1.0),))


OPS: Table = {
    aten._fft_r2c: Entry(transform),
    aten._fft_c2r: Entry(transform),
    aten._fft_c2c: Entry(transform),
    aten._linalg_solve_ex: Entry(solve, dense="all"),
    aten.linalg_solve_triangular: Entry(solve_triangular, dense="all"),
    aten.linalg_lu_solve: Entry(lu_solve, dense="all"),
    aten.cholesky_solve: letters("...Nk,...MN->...Nk", dense="all"),
    aten.cholesky_inverse: letters("...MN->...MN", dense="all"),
    aten.linalg_inv_ex: letters("...MN->...NM,...", dense="all"),
    aten.linalg_cholesky_ex: letters("...MN->...MN,...", dense="all"),
    aten.linalg_lu_factor_ex: letters("...MN->...MN,...K,...", dense="all"),
    aten.geqrf: letters("...MN->...MN,...K", dense="all"),
    aten.linalg_lu: letters("...MN->...AB,...CD,...EF", dense="all"),
    aten.lu_unpack: Entry(lu_unpack, dense="all"),
    aten.linalg_qr: letters("...MN->...MA,...BN", dense="all"),
    aten.linalg_householder_product: letters("...MN,...K->...MN", dense="all"),
    aten._linalg_svd: letters("...MN->...AB,...C,...DE", dense="all"),
    aten._linalg_eigh: letters("...MN->...N,...MN", dense="all"),
    aten.linalg_eig: letters("...MN->...N,...MN", dense="all"),
    aten._linalg_eigvals: letters("...MN->...N", dense="all"),
    aten._linalg_det: letters("...MN->...,...AB,...K", dense="all"),
    aten._linalg_slogdet: letters("...MN->...,...,...AB,...K", dense="all"),
    aten.linalg_pinv.atol_rtol_tensor: letters("...MN,...,...->...NM", dense="all"),
    aten.linalg_matrix_exp: letters("...MN->...MN", dense="all"),
}
