"""Scores of attention in Triton, with or without a softcap, by few operations that a multiprocessor is slow at."""

# mypy: allow-untyped-defs, allow-untyped-calls
# (kernel arguments are Triton's own values, typed at launch)
from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
"""Scores are in bits: a device has 2 ** x alone."""


@triton.jit
def _reciprocals(x):
    """1 / x of numbers from 1 to 2**30, four by one division, whose unit has the exponentials to compute and is an
    eighth as fast as that of multiplications."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .f32 ab, cd, all;
        mul.f32 ab, $4, $5;
        mul.f32 cd, $6, $7;
        mul.f32 all, ab, cd;
        rcp.approx.ftz.f32 all, all;
        mul.f32 cd, all, cd;
        mul.f32 ab, all, ab;
        mul.f32 $0, cd, $5;
        mul.f32 $1, cd, $4;
        mul.f32 $2, ab, $7;
        mul.f32 $3, ab, $6;
        }
        """,
        "=&f,=&f,=&f,=&f,f,f,f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def graded_scores(products, scale, CAPPED: tl.constexpr, FAST: tl.constexpr):
    """What scores in bits are a multiple of, but for a number that all have in common: products of queries and keys;
    with CAPPED the negative of 1 / (1 + exp(2 * r)), since tanh(r) is 1 plus twice that. FAST: off in the interpreter.
    """
    if CAPPED:
        # from 30 bits on tanh is 1 in fp32
        x = 1 + tl.exp2(tl.minimum(products * scale, 30.0, propagate_nan=tl.PropagateNan.ALL))
        if FAST:
            return -_reciprocals(x)
        else:
            return -1 / x
    else:
        return products


@triton.jit
def powers(graded, slope, base):
    """2 ** (graded * slope - base); base is of each, or of each row."""
    slopes = tl.full(graded.shape, 1.0, tl.float32) * slope
    return tl.exp2(tl.fma(graded, slopes, tl.broadcast_to(-base, graded.shape)))


def scales(scale: float, softcap: float | None) -> tuple[float, float, float]:
    """What products are multiplied by for `graded_scores`, and how scores in bits follow from it: times, and plus."""
    if softcap is None:
        return 1.0, scale * LOG2_E, 0.0
    return 2 * scale * LOG2_E / softcap, 2 * softcap * LOG2_E, softcap * LOG2_E
