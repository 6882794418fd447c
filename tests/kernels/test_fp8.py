"""fp8 products: how far rounding to blocks goes, that shards quantize as the whole does, and what gradients are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from tpshard.kernels.fp8 import fp8
from tpshard.kernels.fp8.fp8 import dequantize, fp8_linear, quantize
from tpshard.kernels.fp8.fp8_blocks import BLOCK, SMALLEST


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_to(x: Tensor, dim: int) -> Tensor:
    """A matrix as fp8 holds it in blocks along a dim."""
    values = dequantize(*quantize(x, transposed=dim == 0))
    return values.t() if dim == 0 else values


@pytest.mark.parametrize("dim", [0, 1])
def test_numbers_are_rounded_to_four_significant_bits_of_their_block(dim: int) -> None:
    x = normal(256, 384) * torch.logspace(-12, 12, 384)
    blocks = (x if dim == 1 else x.t()).unflatten(1, (-1, BLOCK))
    step = blocks.abs().amax(-1, keepdim=True) / 448 * 2.0**-10  # half of the smallest number of e4m3
    error = (round_to(x, dim) - x).abs()
    error = (error if dim == 1 else error.t()).unflatten(1, (-1, BLOCK))
    assert (error <= 1.001 * torch.maximum(blocks.abs() / 16, step)).all()
    assert (error > blocks.abs() / 32).any()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_shard_of_whole_blocks_has_the_bits_of_the_whole(transposed: bool) -> None:
    x = normal(256, 256)
    values, scales = quantize(x, transposed)
    for part in range(2):
        own = x.chunk(2, 0 if transposed else 1)[part]
        shard, shard_scales = quantize(own, transposed)
        assert torch.equal(shard.float(), values.chunk(2, 1)[part].float())
        assert torch.equal(shard_scales, scales.chunk(2, 0)[part])


def test_each_gradient_is_the_product_of_operands_rounded_along_its_own_contraction() -> None:
    x, w, dy = normal(2, 128, 256), normal(384, 256, seed=1), normal(2, 128, 384, seed=2)
    x.requires_grad_(), w.requires_grad_()
    y = fp8_linear(x, w)
    dx, dw = torch.autograd.grad(y, [x, w], dy)
    rows, grads, w = x.detach().flatten(0, 1), dy.flatten(0, 1), w.detach()
    torch.testing.assert_close(y.flatten(0, 1), round_to(rows, 1) @ round_to(w, 1).t(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(dx.flatten(0, 1), round_to(grads, 1) @ round_to(w, 0), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(dw, round_to(grads, 0).t() @ round_to(rows, 0), rtol=1e-5, atol=1e-4)


def test_what_is_not_finite_stays_so_and_zeros_stay_zeros() -> None:
    x, w = torch.zeros(2, 1, 128), normal(128, 128)
    x = x.expand(2, 128, 128).clone()
    x[0, 0, 0], x[0, 1, 0], x[0, 2, 0] = torch.nan, torch.inf, 1e-35
    y = fp8_linear(x, w)
    assert not y[0, :2].isfinite().any() and y[0, 2:].isfinite().all() and (y[1] == 0).all()


@pytest.mark.parametrize(
    ("x", "w"), [((1, 64, 128), (128, 128)), ((1, 128, 192), (128, 192)), ((1, 128, 128), (8, 128))]
)
def test_sizes_that_are_not_whole_blocks_are_refused(x: tuple[int, ...], w: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"is not n \* 128"):
        fp8_linear(normal(*x), normal(*w))


@pytest.mark.parametrize("equation", ["abk,nk->anb", "akb,nk->abn", "ak,nk->akn"])
def test_only_products_of_two_matrices_are_taken(equation: str) -> None:
    with pytest.raises(ValueError, match="not a product of two matrices"):
        fp8.contraction_of(equation)


def test_hopper_multiplies_by_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales lie as `_scaled_mm` reads them, which its own check of shapes and strides says."""
    pytest.importorskip("triton")
    from tpshard.kernels.fp8 import fp8_launch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with FakeTensorMode():
        a, b = (torch.empty(rows, 384, dtype=torch.float8_e4m3fn, device="cuda") for rows in (48, 256))
        scales = [torch.empty(3, rows, device="cuda") for rows in (48, 256)]
        assert fp8_launch.multiply(a, scales[0], b, scales[1], torch.bfloat16).shape == (48, 256)
        with pytest.raises(RuntimeError, match="scal"):
            fp8_launch.multiply(a, scales[0].t(), b, scales[1], torch.bfloat16)
    assert not fp8_launch.by_library(48, 256, 128, a.device)


@pytest.mark.parametrize("capability", [89, 90, 100])
def test_the_triton_kernels_compile_for_devices_with_fp8(capability: int) -> None:
    pytest.importorskip("triton")
    from tpshard.kernels.fp8 import fp8_launch, triton_fp8

    from compiled_kernel import compile_kernel

    types = {"row_stride": "i32", "column_stride": "i32"} | dict.fromkeys(("values", "a", "b"), "*fp8e4nv")
    types |= dict.fromkeys(("scales", "a_scales", "b_scales"), "*fp32")
    rounding: dict[str, float] = {"SMALLEST": SMALLEST, "BLOCK_M": fp8_launch.QUANTIZE_ROWS}
    tile = fp8_launch.tile(divmod(capability, 10))
    for kernel, constants, warps in ((triton_fp8.quantize_kernel, rounding, 4), (triton_fp8.multiply_kernel, tile, 8)):
        assert compile_kernel(kernel, dict(constants), "bf16", capability, warps, 3, types).binary
