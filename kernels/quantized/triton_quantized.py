"""Fused dequantize-and-multiply in Triton, for decode (split-K) and prefill, plain or gate|up with silu(gate) * up.

The reference of every kernel is `quantized.reference_matmul`. The weight is the left operand, out^T = W^T x^T: on
Hopper `wgmma` then reads it from registers, straight from the packed words. `packed.py` arranges the words so that a
thread unpacks exactly the values it multiplies, without shared memory. `lop3` with a magic exponent turns a word into
pairs of fp16 or bf16, and one fused multiply-add subtracts magic number and zero, exactly. A group's scale multiplies
the fp32 sums of its rows.
"""
# mypy: allow-untyped-defs, allow-untyped-calls
# (kernel arguments are Triton's own values, typed at launch)

from __future__ import annotations

import triton
import triton.language as tl

# Pair p of a word: bits [c*p, c*p + c) hold its low value and bits [16 + c*p, 16 + c*p + c) its high one. OR-ing a
# field into 1024 (fp16) or 128 (bf16), whose last mantissa bit is worth 1, gives the number 1024 + q or 128 + q.


@triton.jit
def _pairs4(words, offset, FP16: tl.constexpr):
    """A word's eight 4-bit codes less the zero, as (low, high) of pairs 0..3; `offset` also removes a magic number."""
    if FP16:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d, one;
            mov.b32 one, 0x3c003c00;
            shr.u32 b, $8, 4;
            shr.u32 c, $8, 8;
            shr.u32 d, $8, 12;
            lop3.b32 a, $8, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 b, b, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 c, c, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 d, d, 0x000f000f, 0x64006400, 0xea;
            fma.rn.f16x2 a, a, one, $9;
            fma.rn.f16x2 b, b, one, $9;
            fma.rn.f16x2 c, c, one, $9;
            fma.rn.f16x2 d, d, one, $9;
            mov.b32 {$0, $1}, a;
            mov.b32 {$2, $3}, b;
            mov.b32 {$4, $5}, c;
            mov.b32 {$6, $7}, d;
            }
            """,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [words, offset],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16) * 2,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d, one;
            mov.b32 one, 0x3f803f80;
            shr.u32 b, $8, 4;
            shr.u32 c, $8, 8;
            shr.u32 d, $8, 12;
            lop3.b32 a, $8, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 a, a, one, $9;
            fma.rn.bf16x2 b, b, one, $9;
            fma.rn.bf16x2 c, c, one, $9;
            fma.rn.bf16x2 d, d, one, $9;
            mov.b32 {$0, $1}, a;
            mov.b32 {$2, $3}, b;
            mov.b32 {$4, $5}, c;
            mov.b32 {$6, $7}, d;
            }
            """,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [words, offset],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16) * 2,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _field(words, zero, SHIFT: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    return (((words >> SHIFT) & ((1 << BITS) - 1)) - zero).to(tl.float32).to(DTYPE)


@triton.jit
def _join4(a, b, c, d):
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _side(words, zero, BASE: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """The low (BASE 0) or high (BASE 16) values of all pairs of a word, in new last dims, by plain arithmetic."""
    if BITS == 8:
        return tl.join(_field(words, zero, BASE, 8, DTYPE), _field(words, zero, BASE + 8, 8, DTYPE))
    elif BITS == 4:
        return _join4(
            _field(words, zero, BASE, 4, DTYPE),
            _field(words, zero, BASE + 4, 4, DTYPE),
            _field(words, zero, BASE + 8, 4, DTYPE),
            _field(words, zero, BASE + 12, 4, DTYPE),
        )
    else:
        even = _join4(
            _field(words, zero, BASE, 2, DTYPE),
            _field(words, zero, BASE + 4, 2, DTYPE),
            _field(words, zero, BASE + 8, 2, DTYPE),
            _field(words, zero, BASE + 12, 2, DTYPE),
        )
        odd = _join4(
            _field(words, zero, BASE + 2, 2, DTYPE),
            _field(words, zero, BASE + 6, 2, DTYPE),
            _field(words, zero, BASE + 10, 2, DTYPE),
            _field(words, zero, BASE + 14, 2, DTYPE),
        )
        return tl.join(even, odd)


@triton.jit
def unpack(words, zero, BITS: tl.constexpr, CHUNK: tl.constexpr, QUADS: tl.constexpr, FAST: tl.constexpr,
           DTYPE: tl.constexpr):  # fmt: skip
    """The values q - zero, exact, as DTYPE [N, CHUNK], of words int32 [N, CHUNK * BITS / 32] and zero int32 [N]."""
    N: tl.constexpr = words.shape[0]
    words = tl.reshape(words, (N, 4, CHUNK * BITS // 128))
    zero = zero[:, None, None]
    if FAST and BITS == 4:
        if tl.float16 == DTYPE:
            offset = zero * 0x10001 | -0x1BFF1C00  # -(1024 + zero), twice
        else:
            offset = zero * 0x10001 | -0x3CFF3D00  # -(128 + zero), twice
        words, offset = tl.broadcast(words, offset)
        a, b, c, d, e, f, g, h = _pairs4(words, offset, tl.float16 == DTYPE)
        values = tl.join(_join4(a, c, e, g), _join4(b, d, f, h))
    else:
        values = tl.join(_side(words, zero, 0, BITS, DTYPE), _side(words, zero, 16, BITS, DTYPE))
    # packed.py says where a word's values are among the inputs.
    if QUADS:
        values = tl.reshape(values, (N, 4, CHUNK // 16, 4))
    else:
        values = tl.reshape(values, (N, 4, CHUNK // 8, 2))
    return tl.reshape(tl.permute(values, (0, 2, 1, 3)), (N, CHUNK))


@triton.jit
def _dot(a, b, acc, FAST: tl.constexpr, PRECISION: tl.constexpr):
    if FAST:
        return tl.dot(a, b, acc, input_precision=PRECISION)
    else:  # Triton's interpreter multiplies the bit patterns of bf16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)


@triton.jit
def _silu_mul(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def matmul_kernel(
    x, words, scales, zeros, bias, out, partial, arrived, order, starts, ends, experts, first_block,
    M, N, K, chunks, group_chunks, first_chunk, blocks_m, count, groups,
    SHARING: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr, GATED: tl.constexpr, RAGGED: tl.constexpr, SYMMETRIC: tl.constexpr,
    BIASED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, QUADS: tl.constexpr, FAST: tl.constexpr,
    ONE_PASS: tl.constexpr, PRECISION: tl.constexpr, LARGE: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x[M, K] @ W, or silu(x @ W[:, :N]) * (x @ W[:, N:]) where GATED.

    words [chunks, columns, CHUNK * BITS / 32], columns N or 2N; scales, zeros [groups, columns]. Chunk c belongs to
    group (c + first_chunk) // group_chunks, if RAGGED to its own. Grid: (m and n blocks, splits). With SPLIT_K the last
    program of a block to arrive adds the partial sums [splits, 1 or 2, M, N] in a fixed order.

    With SHARING, words, scales and zeros are those of `count` experts one after another, and a block of rows is choices
    of one of them (see `triton_experts`): out[c] = x[c // SHARING] @ W of the expert of choice c. LARGE: x or out has
    more than 2**31 elements.
    """
    block = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    n = (block // blocks_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, CHUNK)
    if SHARING > 0:
        block_m = block % blocks_m
        expert = tl.load(experts + block_m).to(tl.int64)
        if expert >= count:
            return
        place = tl.load(starts + expert) + (block_m - tl.load(first_block + expert)) * BLOCK_M + tl.arange(0, BLOCK_M)
        rows = place < tl.load(ends + expert)
        m = tl.load(order + place, mask=rows, other=0).to(tl.int32)
        source = m // SHARING
    else:
        m = (block % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
        rows = m < M
        source = m
    if LARGE:
        m = m.to(tl.int64)
        source = source.to(tl.int64)
    if EVEN_N:
        column = n
    else:
        column = tl.minimum(n, N - 1)  # computed twice, stored once
    if GATED:
        columns = 2 * N
    else:
        columns = N
    WORDS: tl.constexpr = CHUNK * BITS // 32
    DTYPE: tl.constexpr = x.dtype.element_ty
    TOGETHER: tl.constexpr = 2 if CHUNK == 32 else 1  # short chunks share a turn's barriers and counters
    if SHARING > 0:
        words += expert * chunks * columns * WORDS
        scales += expert * groups * columns
        zeros += expert * groups * columns

    first = chunks * part // parts
    last = chunks * (part + 1) // parts
    word_at = words + column[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    x_at = x + source[:, None] * K + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if GATED:
        acc_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    middle = tl.full((BLOCK_N,), MIDDLE, tl.int32)
    empty = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)

    # A group's scales and zeros are loaded one chunk ahead, so that no multiplication waits for them.
    if RAGGED:
        group = first
    else:
        group = (first + first_chunk) // group_chunks
    scale = tl.load(scales + group * columns + column)
    if not SYMMETRIC:
        zero = tl.load(zeros + group * columns + column)
    if GATED:
        scale_up = tl.load(scales + group * columns + column + N)
        if not SYMMETRIC:
            zero_up = tl.load(zeros + group * columns + column + N)

    for c in tl.range(first, last, loop_unroll_factor=TOGETHER):
        if ONE_PASS:
            packed = tl.load(word_at + c * (columns * WORDS), eviction_policy="evict_first")
        else:
            packed = tl.load(word_at + c * (columns * WORDS))
        if EVEN_K:
            inputs = tl.load(x_at + c * CHUNK, mask=rows[:, None], other=0.0)
        else:
            inputs = tl.load(x_at + c * CHUNK, mask=rows[:, None] & (c * CHUNK + k < K)[None, :], other=0.0)
        inputs = tl.trans(inputs)
        if GATED:
            if ONE_PASS:
                packed_up = tl.load(word_at + (c * columns + N) * WORDS, eviction_policy="evict_first")
            else:
                packed_up = tl.load(word_at + (c * columns + N) * WORDS)
        now, group = scale, tl.minimum(c + 1, last - 1)
        if not RAGGED:
            group = (group + first_chunk) // group_chunks
        scale = tl.load(scales + group * columns + column)
        if SYMMETRIC:
            values = unpack(packed, middle, BITS, CHUNK, QUADS, FAST, DTYPE)
        else:
            values = unpack(packed, zero.to(tl.int32), BITS, CHUNK, QUADS, FAST, DTYPE)
            zero = tl.load(zeros + group * columns + column)
        acc += _dot(values, inputs, empty, FAST, PRECISION) * now.to(tl.float32)[:, None]
        if GATED:
            now = scale_up
            scale_up = tl.load(scales + group * columns + column + N)
            if SYMMETRIC:
                values = unpack(packed_up, middle, BITS, CHUNK, QUADS, FAST, DTYPE)
            else:
                values = unpack(packed_up, zero_up.to(tl.int32), BITS, CHUNK, QUADS, FAST, DTYPE)
                zero_up = tl.load(zeros + group * columns + column + N)
            acc_up += _dot(values, inputs, empty, FAST, PRECISION) * now.to(tl.float32)[:, None]

    cells = m[None, :] * N + n[:, None]
    inside = rows[None, :] & (n < N)[:, None]
    finish = True
    if SPLIT_K:
        if GATED:
            layer = 2 * M * N
        else:
            layer = M * N
        tl.store(partial + part * layer + cells, acc, mask=inside)
        if GATED:
            tl.store(partial + part * layer + M * N + cells, acc_up, mask=inside)
        tl.debug_barrier()  # all threads' partial sums are written before one thread counts the arrival
        finish = tl.atomic_add(arrived + block, 1, sem="acq_rel") == parts - 1
        if finish:
            tl.store(arrived + block, 0)  # ready for the next launch
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            if GATED:
                acc_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for i in range(parts):
                acc += tl.load(partial + i * layer + cells, mask=inside, other=0.0, cache_modifier=".cg")
                if GATED:
                    acc_up += tl.load(partial + i * layer + M * N + cells, mask=inside, other=0.0, cache_modifier=".cg")
    if finish:
        if BIASED:
            acc += tl.load(bias + column).to(tl.float32)[:, None]
            if GATED:
                acc_up += tl.load(bias + column + N).to(tl.float32)[:, None]
        if GATED:
            acc = _silu_mul(acc, acc_up)
        tl.store(out + cells, acc.to(DTYPE), mask=inside)


@triton.jit
def dequantize_kernel(
    words, scales, zeros, pieces, out, N, K, chunks, group_chunks, first_chunk,
    BITS: tl.constexpr, MIDDLE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, RAGGED: tl.constexpr,
    SYMMETRIC: tl.constexpr, QUADS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Writes the dense weight out[N, K], the layout of torch's linear, from packed words. Grid: (n blocks, chunks)."""
    c = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.minimum(n, N - 1)
    k = tl.arange(0, CHUNK)
    WORDS: tl.constexpr = CHUNK * BITS // 32
    DTYPE: tl.constexpr = out.dtype.element_ty
    packed = tl.load(words + (c * N + column)[:, None] * WORDS + tl.arange(0, WORDS)[None, :])
    at = (c + first_chunk) // group_chunks * N + column
    if SYMMETRIC:
        zero = tl.full((BLOCK_N,), MIDDLE, tl.int32)
    else:
        zero = tl.load(zeros + at).to(tl.int32)
    values = unpack(packed, zero, BITS, CHUNK, QUADS, FAST, DTYPE).to(tl.float32)
    values = values * tl.load(scales + at).to(tl.float32)[:, None]
    if RAGGED:
        begin, count = tl.load(pieces + c), tl.load(pieces + chunks + c)
    else:
        begin, count = c * CHUNK, K - c * CHUNK
    # Exact so far; the file's value is this rounded to fp16.
    tl.store(out + n[:, None].to(tl.int64) * K + (begin + k)[None, :],
             values.to(tl.float16).to(tl.float32).to(DTYPE), mask=(n < N)[:, None] & (k < count)[None, :])  # fmt: skip
