"""RMSNorm in Triton, which can store its result in a permuted order."""

# mypy: allow-untyped-defs, allow-untyped-calls
# (kernel arguments are Triton's own values, typed at launch)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x, y, weight, order, total, out, inner, stride, width, eps, BLOCK: tl.constexpr, PERMUTED: tl.constexpr,
    ADDED: tl.constexpr,
):  # fmt: skip
    """out[r, i] = (x[r] / rms(x[r]) * weight)[order[i]], one program per row, BLOCK >= width.

    Row r begins at element r // inner * stride + r % inner * width of x, such as the heads of a part of each token.
    With ADDED x is x + y, rounded as it is stored in `total`; rows of y and total are contiguous. The sum of squares
    runs over the row as stored, so that permuting changes no value's bits.
    """
    index = tl.program_id(0).to(tl.int64)
    row = index // inner * stride + index % inner * width
    i = tl.arange(0, BLOCK)
    inside = i < width
    stored = tl.load(x + row + i, mask=inside, other=0.0)
    if ADDED:
        more = tl.load(y + index * width + i, mask=inside, other=0.0)
        stored = (stored.to(tl.float32) + more.to(tl.float32)).to(stored.dtype)
        tl.store(total + index * width + i, stored, mask=inside)
    values = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / width + eps)
    if PERMUTED:
        source = tl.load(order + i, mask=inside, other=0)
        stored = tl.load(x + row + source, mask=inside, other=0.0)
        if ADDED:
            more = tl.load(y + index * width + source, mask=inside, other=0.0)
            stored = (stored.to(tl.float32) + more.to(tl.float32)).to(stored.dtype)
        values = stored.to(tl.float32)
        factor = tl.load(weight + source, mask=inside, other=0.0).to(tl.float32)
    else:
        factor = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    normed = (values * scale).to(out.dtype.element_ty).to(tl.float32)  # rounded before the weight, as the model does
    tl.store(out + index * width + i, (normed * factor).to(out.dtype.element_ty), mask=inside)
