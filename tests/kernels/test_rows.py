"""What a step does to its rows on a CPU, against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from tpshard.kernels import llvm_launch, rows


def drawn(*shape, dtype=torch.float32, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.fixture(params=["program", "plain"])
def way(request, monkeypatch):
    """With LLVM's programs, and on a CPU that has none."""
    if request.param == "plain":
        monkeypatch.setattr(llvm_launch, "available", lambda: False)
    return request.param


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 96, 40])
def test_norm(width, dtype):
    x, weight, order = drawn(1, 5, width, dtype=dtype), drawn(width, seed=1, dtype=dtype), torch.randperm(width)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    y = rows.rms_norm(x, weight, None, 1e-5)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(rows.rms_norm(x, weight, order, 1e-5), y[..., order])
    assert torch.equal(rows.rms_norm(x[:, 2:3], weight, None, 1e-5), y[:, 2:3])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("heads", "dim"), [(4, 64), (1, 16), (3, 12)])
def test_rotation_is_torchs_bit_for_bit(heads, dim):
    x, cos, sin = drawn(1, 7, heads, dim), drawn(1, 7, 1, dim, seed=1), drawn(1, 7, 1, dim, seed=2)
    assert torch.equal(rows.rotate(x, cos, sin), x * cos + torch.roll(x, dim // 2, -1) * sin)
    several = drawn(2, 7, heads, dim)
    assert torch.equal(rows.rotate(several, cos, sin), several * cos + torch.roll(several, dim // 2, -1) * sin)


@pytest.mark.parametrize("width", [32, 2816, 40, 36])
def test_gate(width, way):
    x, up = drawn(1, 4, width), drawn(1, 4, width, seed=1)
    x[0, 0, :6] = torch.tensor([0.0, -0.0, 1e4, -1e4, float("inf"), -90.0])
    x[0, 3, 5] = float("nan")
    y = rows.gate(x, up)
    torch.testing.assert_close(y, F.silu(x) * up, rtol=1e-6, atol=1e-30, equal_nan=True)
    if width % (8 if way == "program" else 32) == 0:  # what is left after whole vectors torch computes in another way
        assert torch.equal(rows.gate(x[:, 1:2], up[:, 1:2]), y[:, 1:2])
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(rows.gate(turned, up), y, rtol=1e-6, atol=1e-30, equal_nan=True)
