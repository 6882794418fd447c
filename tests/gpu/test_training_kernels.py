"""Kernels of training steps on a device, optimizers' steps and fp8 products, equal torch's operations on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from tpshard.kernels.fp8 import fp8
from tpshard.kernels.optimizer_steps import adamw_formula, adamw_step, lion_formula, lion_step, square_sum

ours = torch.ops.tpshard
STEPS = [
    (2, adamw_step, adamw_formula, ours.adamw_step_, (0.9, 0.95, 1e-6, 0.1)),
    (1, lion_step, lion_formula, ours.lion_step_, (0.9, 0.99, 0.1)),
]
DTYPES = [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float32, torch.bfloat16)]
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-7}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture(autouse=True)
def with_fp8(request: pytest.FixtureRequest) -> None:
    on_gpu = "device" in request.fixturenames and request.getfixturevalue("device") == "cuda"
    if "fp8" in request.node.name and on_gpu and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a CUDA device that multiplies fp8: 8.9 or above")


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize(("dtype", "of_moments"), DTYPES, ids=str)
@pytest.mark.parametrize(("moments", "step", "formula", "in_place", "settings"), STEPS, ids=["adamw", "lion"])
def test_steps_are_their_formulas(
    moments: int, step: Any, formula: Any, in_place: Any, settings: Any, dtype: torch.dtype, of_moments: torch.dtype,
    finite: bool, device: str,
) -> None:  # fmt: skip
    """Sizes that are no multiple of a program's elements; new tensors, in place, and in place over transposed ones."""
    param, grad = normal(37, 1100, dtype=dtype), normal(37, 1100, seed=1, dtype=dtype)
    states = [normal(37, 1100, seed=2 + i, dtype=of_moments).abs() for i in range(moments)]
    scalars = [torch.tensor(x, dtype=dtype) for x in (0.25, 0.01, 3.0)[: 1 + moments]]
    operands = [param, grad, *states, torch.tensor(finite), *scalars]
    expected = formula(*operands, *settings)
    there = [x.to(device) for x in operands]
    results = [step(*there, *settings)]
    for written in (list(there), [x.T.contiguous().T if x.dim() else x for x in there]):
        written = [x.clone() for x in written]
        in_place(*written, *settings)
        results.append((written[0], *written[2 : 2 + moments]))
    for result in results:
        for actual, value in zip(result, expected, strict=True):
            rounding = ROUNDING[actual.dtype]
            torch.testing.assert_close(actual.cpu(), value, rtol=rounding, atol=rounding)


def test_sums_of_squares(device: str) -> None:
    x, scale = normal(37, 1100), torch.tensor(0.5)
    actual = square_sum(x.to(device), scale.to(device)).cpu()
    torch.testing.assert_close(actual, (x.double() * 0.5).square().sum().float(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_values_and_scales_have_the_bits_of_the_cpu(dtype: torch.dtype, transposed: bool, device: str) -> None:
    """A row of zeros too; in a block with a NaN only the NaN is the same."""
    x = normal(256, 384, dtype=dtype)
    x[0, 0], x[1] = torch.nan, 0.0
    values, scales = (y.cpu() for y in ours.fp8_quantize(x.to(device), transposed))
    expected, expected_scales = fp8.quantize(x, transposed)
    assert values[0, 0].float().isnan() and expected_scales.isnan().sum() == 1
    values[0, :128], expected[0, :128] = 0.0, 0.0
    scales[0, 0], expected_scales[0, 0] = 1.0, 1.0
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(128, 256, 128), (384, 1024, 640)])
def test_fp8_products_and_their_gradients(rows: int, inputs: int, outputs: int, device: str) -> None:
    """Both sides sum the same rounded numbers; tensor cores keep about 14 bits of the sum of a block."""
    operands = [normal(2, rows, inputs), normal(outputs, inputs, seed=1), normal(2, rows, outputs, seed=2)]

    def values(*operands: Tensor) -> list[Tensor]:
        x, weight, grad = operands
        x.requires_grad_(), weight.requires_grad_()
        y = fp8.fp8_linear(x, weight)
        return [y.detach(), *torch.autograd.grad(y, [x, weight], grad)]

    actual = values(*(x.to(device) for x in operands))
    for one, other in zip(actual, values(*(x.clone() for x in operands)), strict=True):
        assert (one.cpu().double() - other.double()).norm() <= 2e-3 * other.double().norm()
