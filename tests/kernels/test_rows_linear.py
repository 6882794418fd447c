"""A row of a product has the same bits whatever the other rows are."""

from __future__ import annotations

import pytest
import torch
from tpshard.kernels import rows_linear


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k,n", [(64, 96), (96, 200), (512, 384)])
def test_rows_do_not_know_of_each_other(k: int, n: int, dtype: torch.dtype, packed: bool) -> None:
    torch.manual_seed(k)
    x, w, b = (t.to(dtype) for t in (torch.randn(64, k), torch.randn(n, k), torch.randn(n)))
    if packed and not rows_linear.can_pack(w):
        pytest.skip("this torch packs no weights")

    def product(rows: torch.Tensor) -> torch.Tensor:
        if packed:
            return torch.ops.tpshard.packed_rows_linear(rows, rows_linear.pack(w), b, n)
        return torch.ops.tpshard.rows_linear(rows, w, b)

    whole = product(x)
    tolerance = 1e-4 if dtype == torch.float32 else 0.3
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, w, b), rtol=tolerance, atol=tolerance)
    order = torch.randperm(64)
    assert torch.equal(product(x[order]), whole[order])
    for rows in (8, 24, 40):
        assert torch.equal(product(x[order][:rows]), whole[order][:rows])


def test_other_numbers_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        torch.ops.tpshard.rows_linear(torch.zeros(9, 4), torch.zeros(3, 4), None)
