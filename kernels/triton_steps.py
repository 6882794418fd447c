"""Small kernels of a server's step in Triton, where each launch costs more than what it moves."""

# mypy: allow-untyped-defs, allow-untyped-calls
# (kernel arguments are Triton's own values, typed at launch)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_kernel(
    x, y, cos, sin, x_out, y_out, x_stride, y_stride, x_heads, HEAD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """`kernels.rotary` of x and y. Grid: (rows, heads of both, x's first); strides are those of rows, whose heads
    adjoin."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < HEAD
    if head < x_heads:
        source, target = x + row * x_stride + head * HEAD, x_out + (row * x_heads + head) * HEAD
    else:
        head -= x_heads
        y_heads = tl.num_programs(1) - x_heads
        source, target = y + row * y_stride + head * HEAD, y_out + (row * y_heads + head) * HEAD
    values = tl.load(source + i, mask=inside, other=0.0)
    turned = tl.load(source + tl.where(i < HEAD // 2, i + HEAD // 2, i - HEAD // 2), mask=inside, other=0.0)
    kind = values.dtype
    a = values.to(tl.float32) * tl.load(cos + row * HEAD + i, mask=inside, other=0.0).to(tl.float32)
    b = turned.to(tl.float32) * tl.load(sin + row * HEAD + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + i, (a.to(kind).to(tl.float32) + b.to(kind).to(tl.float32)).to(kind), mask=inside)


@triton.jit
def store_rows_kernel(k, v, k_pool, v_pool, slots, k_stride, v_stride, width, BLOCK: tl.constexpr):
    """Writes the rows of k and v, of `width` elements, to their slots of the pools. Grid: (rows, 2)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    i = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        values = tl.load(k + row * k_stride + i, mask=i < width)
        tl.store(k_pool + slot * width + i, values.to(k_pool.dtype.element_ty), mask=i < width)
    else:
        values = tl.load(v + row * v_stride + i, mask=i < width)
        tl.store(v_pool + slot * width + i, values.to(v_pool.dtype.element_ty), mask=i < width)
