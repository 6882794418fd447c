"""Products in fp8 (e4m3) with a scale for every block of 128 elements along the contraction, forward and backward.

    tpshard::fp8_product(a, b, equation) -> what einsum(equation, a, b) computes, of operands rounded to fp8
    tpshard::fp8_quantize(x [m, k], transposed) -> (values [m, k] e4m3, scales [k / 128, m])
    tpshard::fp8_multiply(a [m, k], a_scales [k / 128, m], b [n, k], b_scales [k / 128, n], dtype) -> [m, n]

A block is divided by its scale, its largest absolute value / 448, and rounded to e4m3 (DeepSeek-AI 2024, arXiv
2412.19437, section 3.3, with blocks of 1 x 128 in both operands). `fp8_quantize` takes x as [k, m] if `transposed`.
Scales and sums are fp32, and fp64 for fp64 operands. Each of a linear layer's three products quantizes both operands
along its own contraction. A shard that holds whole blocks has the same values and scales as one device.

A CPU multiplies the dequantized operands. A GPU needs fp8 instructions: compute capability 8.9 or above.
"""

from __future__ import annotations

import math
from string import ascii_lowercase
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tpshard.kernels.dtypes import wide_dtype
from tpshard.kernels.fp8.fp8_blocks import BLOCK, SMALLEST
from tpshard.kernels.operation import operation

VALUES = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3."""


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., k] @ weight [n, k].T + bias [n] -> [..., n], with a product in fp8; so are those of its gradients.

    ValueError if n, k, or the dim of x before the last is not a multiple of 128: each is one product's contraction.
    """
    rows = ascii_lowercase[: x.dim() - 1]
    if bad := [size for size in (x.shape[-2], *weight.shape) if size % BLOCK]:
        raise ValueError(f"fp8_linear: x {list(x.shape)}, weight {list(weight.shape)}: {bad[0]} is not n * {BLOCK}")
    y: Tensor = PRODUCT(x, weight, f"{rows}y,zy->{rows}z")
    return y if bias is None else y + bias


class Side(NamedTuple):
    """How one operand of an equation is arranged as a matrix for `fp8_quantize`."""

    rows: str
    """The letters of the operand's dims that the result keeps."""
    transposed: bool
    """Whether the operand's summed dims come first."""


class Contraction(NamedTuple):
    """The operands and the summed dims of an equation such as `bsk,nk->bsn`."""

    sides: tuple[Side, Side]
    summed: str
    """The summed dims, by letter; blocks lie along the last."""


def contraction_of(equation: str) -> Contraction:
    """Parses an equation such as `bsk,nk->bsn`. ValueError unless the summed dims come first or last in each operand,
    in one order."""
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    summed = "".join(c for c in left if c not in out)
    sides = []
    for dims in (left, right):
        rows = "".join(c for c in dims if c in out)
        if not summed or dims not in (rows + summed, summed + rows):
            raise ValueError(f"`{equation}` is not a product of two matrices")
        sides.append(Side(rows, dims != rows + summed))
    if out != sides[0].rows + sides[1].rows:
        raise ValueError(f"`{equation}` is not a product of two matrices")
    return Contraction((sides[0], sides[1]), summed)


def sizes_of(equation: str, a: tuple[int, ...], b: tuple[int, ...]) -> dict[str, int]:
    """The size of every dim of an equation by its letter, from the shapes of its operands. ValueError where the shapes
    do not fit the equation or the blocks."""
    left, right = equation.split("->")[0].split(",")
    sizes = dict(zip(right, b)) | dict(zip(left, a))
    fit = len(left) == len(a) and len(right) == len(b) and all(sizes[c] == n for c, n in zip(right, b))
    if not fit or sizes[contraction_of(equation).summed[-1]] % BLOCK:
        raise ValueError(f"fp8_product: {list(a)} and {list(b)} do not fit `{equation}` in blocks of {BLOCK}")
    return sizes


def _product(a: Tensor, b: Tensor, equation: str) -> Tensor:
    sizes, (sides, _) = sizes_of(equation, tuple(a.shape), tuple(b.shape)), contraction_of(equation)
    parts = []
    for x, side in zip((a, b), sides):
        rows = math.prod(sizes[c] for c in side.rows)
        parts += QUANTIZE(x.reshape((-1, rows) if side.transposed else (rows, -1)), side.transposed)
    return MULTIPLY(*parts, dtype=a.dtype).view([sizes[c] for c in equation.split("->")[1]])


def quantize(x: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Quantizes a matrix to fp8 with a scale per block (`tpshard::fp8_quantize`) in plain torch, on any device."""
    rows = x.t() if transposed else x
    blocks = rows.to(wide_dtype(x)).unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(-1).clamp(min=SMALLEST) / LARGEST
    values = (blocks / scales.unsqueeze(-1)).flatten(1).to(VALUES)
    return values.contiguous(), scales.t().contiguous()


def multiply(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplies dequantized operands (`tpshard::fp8_multiply`) in plain torch, on any device."""
    return (dequantize(a, a_scales) @ dequantize(b, b_scales).t()).to(dtype)


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """values [m, k] times their scales [k / 128, m], in the dtype of the scales."""
    return (values.to(scales.dtype).unflatten(1, (-1, BLOCK)) * scales.t().unsqueeze(-1)).flatten(1)


def _check_device(device: torch.device) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise RuntimeError(f"{name} (sm_{major}{minor}) cannot multiply fp8; sm_89 and above can, such as H100")


def _cuda_quantize(x: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float64:
        return quantize(x, transposed)
    from tpshard.kernels.fp8 import fp8_launch  # needs Triton, which CPU builds of torch lack

    _check_device(x.device)
    with torch.cuda.device(x.device):
        return fp8_launch.quantize(x.contiguous(), transposed)


def _cuda_multiply(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype) -> Tensor:
    if a_scales.dtype == torch.float64:
        return multiply(a, a_scales, b, b_scales, dtype)
    from tpshard.kernels.fp8 import fp8_launch

    _check_device(a.device)
    with torch.cuda.device(a.device):
        return fp8_launch.multiply(a, a_scales, b, b_scales, dtype)


def _product_shape(a: Tensor, b: Tensor, equation: str) -> Tensor:
    sizes = sizes_of(equation, tuple(a.shape), tuple(b.shape))
    return a.new_empty([sizes[c] for c in equation.split("->")[1]])


def _quantize_shape(x: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    m, k = x.shape[::-1] if transposed else x.shape
    return x.new_empty((m, k), dtype=VALUES), x.new_empty((k // BLOCK, m), dtype=wide_dtype(x))


def _multiply_shape(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    a, b, ctx.equation = inputs
    ctx.save_for_backward(a, b)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b = ctx.saved_tensors
    inputs, out = ctx.equation.split("->")
    left, right = inputs.split(",")
    da = PRODUCT(grad, b, f"{out},{right}->{left}") if ctx.needs_input_grad[0] else None
    db = PRODUCT(grad, a, f"{out},{left}->{right}") if ctx.needs_input_grad[1] else None
    return da, db, None


PRODUCT = operation(
    "fp8_product(Tensor a, Tensor b, str equation) -> Tensor", _product, _product_shape, gradient=_gradient, keep=_keep
)
QUANTIZE = operation(
    "fp8_quantize(Tensor x, bool transposed) -> (Tensor, Tensor)", quantize, _quantize_shape, cuda=_cuda_quantize
)
MULTIPLY = operation(
    "fp8_multiply(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, ScalarType dtype) -> Tensor",
    multiply, _multiply_shape, cuda=_cuda_multiply,
)  # fmt: skip
