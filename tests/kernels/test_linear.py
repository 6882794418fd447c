"""A row of a batch-invariant product has the same bits whatever the other rows are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tpshard.kernels import linear, one_row


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
    monkeypatch.setattr(one_row, "probed", lambda *args: 0)
    assert linear.probed.__wrapped__(96, 64, dtype, 1).tiles == tuple(tile for tile in linear.TILES if tile != 4)


@pytest.mark.parametrize("k,summed", [(96, 96), (96, 64), (64, 16)])
def test_one_row_is_summed_in_parts_in_order(k: int, summed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the library sums; here a weight stands for a packed one whose memory is as an x86's."""
    n = 192
    x, w = torch.randn(1, 1, k), torch.randn(n, k)
    table = w.view(n // one_row.BLOCK, one_row.BLOCK, k).transpose(1, 2).reshape(-1, one_row.BLOCK)
    monkeypatch.setattr(one_row, "_table", lambda *args: table)
    monkeypatch.setattr(torch.ops.mkldnn, "data_ptr", lambda weight: 0)
    parts = [x[0, :, at : at + summed] @ w[:, at : at + summed].T for at in range(0, k, summed)]
    torch.testing.assert_close(one_row.product(x, w, summed), sum(parts)[None])


def test_one_row_has_the_bits_of_many_where_the_probe_says_so() -> None:
    n, k = 128, 704
    summed = linear.packed_dtype(torch.float32) and linear.probed(n, k, torch.float32, torch.get_num_threads()).summed
    if not summed:
        pytest.skip("this machine multiplies one row by its library")
    x, packed = torch.randn(8, k), linear.pack(torch.randn(n, k))
    own = torch.cat([one_row.product(row, packed, summed) for row in x.split(1)])
    assert torch.equal(own, linear.fixed_rows_linear(x, packed))
