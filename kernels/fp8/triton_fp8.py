"""Quantizing to fp8 (e4m3) by blocks of 128, and the product of operands quantized so, in Triton."""

# mypy: allow-untyped-defs, allow-untyped-calls
# (kernel arguments are Triton's own values, typed at launch)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize_kernel(x, values, scales, M, row_stride, column_stride, K, SMALLEST: tl.constexpr, BLOCK_M: tl.constexpr):
    """values [M, K] and scales [K / 128, M] of x, whose element (m, k) lies at m * row_stride + k * column_stride.

    One program per BLOCK_M rows and block of 128 columns.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(1)
    k = block * 128 + tl.arange(0, 128)
    inside = m[:, None] < M
    places = m[:, None].to(tl.int64) * row_stride + k[None, :].to(tl.int64) * column_stride
    tile = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    # a block with a NaN has NaN in its values anyway: dividing keeps it
    largest = tl.maximum(tl.max(tl.abs(tile), 1), SMALLEST)
    scale = tl.div_rn(largest, tl.full((BLOCK_M,), 448.0, tl.float32))  # rounded as on a CPU, unlike `/`
    rounded = tl.div_rn(tile, scale[:, None] + tl.zeros_like(tile)).to(values.dtype.element_ty)
    tl.store(values + m[:, None].to(tl.int64) * K + k[None, :], rounded, mask=inside)
    tl.store(scales + block.to(tl.int64) * M + m, scale, mask=m < M)


@triton.jit
def multiply_kernel(
    a, a_scales, b, b_scales, out, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr
):
    """out [M, N] = a [M, K] @ b [N, K].T, each block of 128 columns of K scaled by its row's scales [K / 128, rows].

    A block's products are summed by the tensor cores and added, scaled, to fp32 sums. One program per tile of out;
    GROUP rows of tiles are computed column by column, so that their operands stay in the cache.
    """
    tile, columns = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    band = tile // (GROUP * columns)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    m = (band * GROUP + tile % (GROUP * columns) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % (GROUP * columns) // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 128)
    a_places = a + m[:, None].to(tl.int64) * K + k[None, :]
    b_places = b + n[None, :].to(tl.int64) * K + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, K, 128):
        left = tl.load(a_places, mask=m[:, None] < M, other=0.0)
        right = tl.load(b_places, mask=n[None, :] < N, other=0.0)
        left_scale = tl.load(a_scales + m, mask=m < M, other=0.0)
        right_scale = tl.load(b_scales + n, mask=n < N, other=0.0)
        sums += tl.dot(left, right) * left_scale[:, None] * right_scale[None, :]
        a_places += 128
        b_places += 128
        a_scales += M
        b_scales += N
    places = out + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(places, sums.to(out.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))
