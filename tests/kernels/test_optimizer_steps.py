"""Optimizers' steps equal their formulas for all dtypes and layouts, in place too, and do nothing where told so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from tpshard.kernels.dtypes import wide_dtype
from tpshard.kernels.optimizer_steps import adamw_formula, adamw_step, lion_formula, lion_step, square_sum

ours = torch.ops.tpshard
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-7}
STEPS: list[tuple[int, Callable[..., Any], Callable[..., Any], Any, tuple[float, ...]]] = [
    (2, adamw_step, adamw_formula, ours.adamw_step_, (0.9, 0.95, 1e-6, 0.1)),
    (1, lion_step, lion_formula, ours.lion_step_, (0.9, 0.99, 0.1)),
]
"""Of each optimizer: the number of its moments, its step, formula and step in place, and its settings."""


def arguments(moments: int, dtype: torch.dtype, of_moments: torch.dtype, finite: bool, number: float) -> list[Tensor]:
    """A parameter of several chunks, with its gradient, moments and scalars."""
    random = torch.Generator().manual_seed(0)
    shape = (3, 2**15 + 5)
    param, grad, *states = (torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(2 + moments))
    wide = torch.promote_types(dtype, torch.float32)
    scalars = [torch.tensor(x, dtype=wide) for x in (0.25, 0.01, number)[: 1 + moments]]
    states = [x.abs().to(of_moments) for x in states]
    return [param.to(dtype), grad.to(wide), *states, torch.tensor(finite), *scalars]


@pytest.mark.parametrize("dtypes", [(torch.float64,) * 2, (torch.float32,) * 2, (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize(("moments", "step", "formula", "in_place", "settings"), STEPS)
def test_a_step_is_its_formula_and_one_in_place_writes_the_same(
    moments: int, step: Any, formula: Any, in_place: Any, settings: Any, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    before = arguments(moments, *dtypes, True, 3.0)
    old = [x.clone() for x in before]
    new = step(*before, *settings)
    assert all(torch.equal(x, y) for x, y in zip(before, old)), "the operands stay as they are"
    for actual, expected in zip(new, formula(*before, *settings), strict=True):
        rounding = ROUNDING[actual.dtype]
        torch.testing.assert_close(actual, expected, rtol=rounding, atol=rounding)
    turned = [x.T.contiguous().T if x.dim() else x for x in before]  # in memory another way
    for operands in (before, turned):
        in_place(*operands, *settings)
        assert all(torch.equal(x, y) for x, y in zip((operands[0], *operands[2 : 2 + moments]), new, strict=True))


@pytest.mark.parametrize(("moments", "step", "formula", "in_place", "settings"), STEPS)
def test_what_is_not_finite_leaves_old_values(
    moments: int, step: Any, formula: Any, in_place: Any, settings: Any
) -> None:
    before = arguments(moments, torch.float32, torch.float32, False, 1.0)
    before[1][0, 0] = float("nan")
    old = (before[0], *before[2 : 2 + moments])
    for new in (step(*before, *settings), formula(*before, *settings)):
        assert all(torch.equal(x, y) for x, y in zip(new, old, strict=True))


@pytest.mark.parametrize("dtype", ROUNDING)
def test_the_sum_of_squares_is_exact_over_many_chunks(dtype: torch.dtype) -> None:
    """A sum element by element would be off by 2e-4 in fp32."""
    x = (torch.rand(2**20 + 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5).to(dtype)
    exact = (x.double() * 0.5).square().sum()
    total = square_sum(x, torch.tensor(0.5, dtype=wide_dtype(x)))
    assert total.dtype == wide_dtype(x)
    torch.testing.assert_close(total.double(), exact, rtol=min(ROUNDING[dtype], 1e-6), atol=0.0)
