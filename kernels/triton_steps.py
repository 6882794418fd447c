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


@triton.jit
def reorder_kernel(x, order, out, width, block, BLOCK: tl.constexpr):
    """out[row, i] = x[row, i // block * block + order[i]]. Grid: (rows, blocks of the width)."""
    row = tl.program_id(0).to(tl.int64) * width
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = i // block * block + tl.load(order + i, mask=i < width, other=0)
    tl.store(out + row + i, tl.load(x + row + source, mask=i < width), mask=i < width)


@triton.jit
def largest_kernel(keys, out, n, count, BLOCK: tl.constexpr):
    """The `count` largest keys of a row, in the order of their places. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    keys += row * n
    bins = tl.arange(0, 256)
    found, shift, left = tl.zeros([], tl.int64), 64, count
    while shift > 0:  # found: the digits of the least of them above `shift`; left: how many begin with these
        shift -= 8
        counts = tl.zeros([256], tl.int32)
        for start in range(0, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            high = tl.load(keys + i, mask=i < n, other=-1) >> shift
            counts += tl.histogram((high & 255).to(tl.int32), 256, mask=(high >> 8) == found)
        above = tl.sum(counts) - tl.cumsum(counts)
        here = (above < left) & (above + counts >= left)
        found = found * 256 + tl.sum(tl.where(here, bins, 0))
        left -= tl.sum(tl.where(here, above, 0))
        if tl.sum(tl.where(here, counts, 0)) == left:  # all that begin so are among them
            found = found << shift
            shift = 0
    written = 0
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        values = tl.load(keys + i, mask=i < n, other=-1)
        taken = (values >= found).to(tl.int32)
        place = written + tl.cumsum(taken) - 1
        tl.store(out + row * count + place, values, mask=(taken > 0) & (place < count))
        written += tl.sum(taken)
