"""Optimizers' steps in Triton: one pass over a parameter, its gradient and its moments, which are written in place."""

# mypy: allow-untyped-defs, allow-untyped-calls
# (kernel arguments are Triton's own values, typed at launch)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adamw_kernel(
    param, grad, exp_avg, exp_avg_sq, finite, scale, lr, update, size, LOG_BETA1: tl.constexpr,
    LOG_BETA2: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, DECAY: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """AdamW of `size` contiguous elements, BLOCK a program, computed in WIDE; nothing is touched unless `finite`.

    1 - beta^update loses digits in fp32, so it is computed in fp64.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size * tl.load(finite).to(tl.int64)
    rate = tl.load(lr).to(WIDE)
    number = tl.load(update).to(tl.float64)
    step = rate / (1.0 - tl.exp(number * LOG_BETA1)).to(WIDE)
    correction = tl.sqrt((1.0 - tl.exp(number * LOG_BETA2)).to(WIDE))
    p = tl.load(param + i, mask=inside, other=0.0).to(WIDE)
    g = tl.load(grad + i, mask=inside, other=0.0).to(WIDE) * tl.load(scale).to(WIDE)
    m = tl.load(exp_avg + i, mask=inside, other=0.0).to(WIDE)
    v = tl.load(exp_avg_sq + i, mask=inside, other=0.0).to(WIDE)
    m = m * BETA1 + g * (1.0 - BETA1)
    v = v * BETA2 + g * g * (1.0 - BETA2)
    p = p * (1.0 - rate * DECAY) - step * (m / (tl.sqrt(v) / correction + EPS))
    tl.store(param + i, p.to(param.dtype.element_ty), mask=inside)
    tl.store(exp_avg + i, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + i, v.to(exp_avg_sq.dtype.element_ty), mask=inside)


@triton.jit
def lion_kernel(
    param, grad, exp_avg, finite, scale, lr, size, BETA1: tl.constexpr, BETA2: tl.constexpr, DECAY: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lion of `size` contiguous elements, BLOCK a program, computed in WIDE; nothing is touched unless `finite`."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size * tl.load(finite).to(tl.int64)
    rate = tl.load(lr).to(WIDE)
    p = tl.load(param + i, mask=inside, other=0.0).to(WIDE)
    g = tl.load(grad + i, mask=inside, other=0.0).to(WIDE) * tl.load(scale).to(WIDE)
    m = tl.load(exp_avg + i, mask=inside, other=0.0).to(WIDE)
    direction = m * BETA1 + g * (1.0 - BETA1)
    sign = (direction > 0).to(WIDE) - (direction < 0).to(WIDE)
    p = p * (1.0 - rate * DECAY) - rate * sign
    m = m * BETA2 + g * (1.0 - BETA2)
    tl.store(param + i, p.to(param.dtype.element_ty), mask=inside)
    tl.store(exp_avg + i, m.to(exp_avg.dtype.element_ty), mask=inside)
