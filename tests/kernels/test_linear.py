"""A row of a batch-invariant product has the same bits whatever the other rows are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tpshard.kernels import linear


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k,n", [(64, 96), (96, 200), (2816, 128)])
def test_rows_do_not_know_of_each_other(k: int, n: int, dtype: torch.dtype, packed: bool) -> None:
    torch.manual_seed(k)
    x, w = (t.to(dtype) for t in (torch.randn(64, k), torch.randn(n, k)))
    if packed and linear.packed_dtype(dtype) is None:
        pytest.skip("this torch packs no weights")
    held = linear.pack(w) if packed else w

    def product(rows: torch.Tensor) -> torch.Tensor:
        return linear.fixed_rows_linear(rows, held)

    whole = product(x)
    exact = F.linear(x.double(), w.double())
    bound = k * 6e-8 + (0 if dtype == torch.float32 else 2**-7)  # of the sum, and of its results in bf16
    assert (whole - exact).norm() <= bound * exact.norm()
    assert torch.equal(product(x.view(2, 32, k)), whole.view(2, 32, n))
    order = torch.randperm(64)
    assert torch.equal(product(x[order]), whole[order])
    for rows in (1, 2, 3, 4, 7, 8, 13, 24, 40):
        assert torch.equal(product(x[order][:rows]), whole[order][:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_sees_another_order_of_sums(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in results that are rounded to bf16."""
    monkeypatch.setattr(linear, "pack", lambda weight: weight)

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        order = [0, *range(2, 64), 1] if len(x) == 4 else range(64)
        wide, total = weight.float(), torch.zeros(len(x), len(weight))
        for i in order:
            total += x[:, i, None].float() * wide[:, i]
        return total.to(x.dtype)

    monkeypatch.setattr(linear, "product", product)
    assert linear.same_bits.__wrapped__(96, 64, dtype, 1) == (64, 32, 16, 8, 2, 1)
