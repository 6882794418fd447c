"""Recurrences in Triton, token by token: a state stays in registers from the first token to the last.

torch's operations read and write a state several times a token, which is most of what decoding costs.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# (kernel arguments are Triton's own values, typed at launch)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def delta_tile(inputs: int) -> dict[str, int]:
    """The part of a head's state [inputs, outputs] that one program holds in registers."""
    return {"INPUTS": triton.next_power_of_2(inputs), "OUTPUTS": 16}


def scan_tile(size: int) -> dict[str, int]:
    """The part of a sequence's state [channels, size] that one program holds in registers."""
    width = triton.next_power_of_2(size)
    return {"CHANNELS": max(1, min(64, 2048 // width)), "SIZE": width}


@triton.jit
def delta_rule_kernel(
    q, k, v, decay, beta, state, out, last, tokens, heads, i_size, o_size, decays,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gated delta rule of one sequence's head, for OUTPUTS of its outputs.

    q, k: [b, tokens, heads, i_size], v: [b, tokens, heads, o_size], decay: [b, tokens, heads, decays] with decays 1 or
    i_size, beta: [b, tokens, heads], state, last: [b, heads, i_size, o_size], out: [b, heads, tokens, o_size].
    """
    head = tl.program_id(0).to(tl.int64)  # of all sequences
    i, o = tl.arange(0, INPUTS), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    in_i, in_o = i < i_size, o < o_size
    inside = in_i[:, None] & in_o[None, :]
    place = (head * i_size + i[:, None]) * o_size + o[None, :]
    kept = tl.load(state + place, mask=inside, other=0.0).to(WIDE)
    row = (head // heads * tokens) * heads + head % heads
    for token in range(tokens):
        query = tl.load(q + row * i_size + i, mask=in_i, other=0.0).to(WIDE)
        key = tl.load(k + row * i_size + i, mask=in_i, other=0.0).to(WIDE)
        value = tl.load(v + row * o_size + o, mask=in_o, other=0.0).to(WIDE)
        fading = tl.load(decay + row * decays + i % decays, mask=in_i, other=0.0).to(WIDE)
        rate = tl.load(beta + row).to(WIDE)
        kept = kept * tl.exp(fading)[:, None]
        wrong = value - tl.sum(kept * key[:, None], 0)
        kept += key[:, None] * (rate * wrong)[None, :]
        result = tl.sum(kept * query[:, None], 0)
        tl.store(out + (head * tokens + token) * o_size + o, result.to(out.dtype.element_ty), mask=in_o)
        row += heads
    tl.store(last + place, kept.to(last.dtype.element_ty), mask=inside)


@triton.jit
def selective_scan_kernel(
    x, step, a, inward, outward, state, out, last, tokens, channels, size,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Mamba's scan of CHANNELS channels of one sequence.

    x, step, out: [b, tokens, channels], a: [channels, size], inward, outward: [b, tokens, size], state, last:
    [b, channels, size].
    """
    sequence = tl.program_id(0).to(tl.int64)
    c, n = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, SIZE)
    in_c, in_n = c < channels, n < size
    inside = in_c[:, None] & in_n[None, :]
    rates = tl.load(a + c[:, None] * size + n[None, :], mask=inside, other=0.0).to(WIDE)
    place = (sequence * channels + c[:, None]) * size + n[None, :]
    kept = tl.load(state + place, mask=inside, other=0.0).to(WIDE)
    row = sequence * tokens
    for _ in range(tokens):
        value = tl.load(x + row * channels + c, mask=in_c, other=0.0).to(WIDE)
        pace = tl.load(step + row * channels + c, mask=in_c, other=0.0).to(WIDE)
        enters = tl.load(inward + row * size + n, mask=in_n, other=0.0).to(WIDE)
        leaves = tl.load(outward + row * size + n, mask=in_n, other=0.0).to(WIDE)
        kept = kept * tl.exp(pace[:, None] * rates) + (pace * value)[:, None] * enters[None, :]
        result = tl.sum(kept * leaves[None, :], 1)
        tl.store(out + row * channels + c, result.to(out.dtype.element_ty), mask=in_c)
        row += 1
    tl.store(last + place, kept.to(last.dtype.element_ty), mask=inside)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Arguments and results as of `kernels.delta_rule`, in one launch."""
    (b, t, h, i), o = q.shape, v.shape[3]
    inputs = [each.contiguous() for each in (q, k, v, decay, beta, state)]
    out, last = v.new_empty(b, h, t, o), state.new_empty(state.shape)
    tile = delta_tile(i)
    delta_rule_kernel[b * h, triton.cdiv(o, tile["OUTPUTS"])](
        *inputs, out, last, t, h, i, o, decay.shape[3], **tile, WIDE=_computed_in(v)
    )
    return out.transpose(1, 2), last


def selective_scan(
    x: Tensor, step: Tensor, a: Tensor, inward: Tensor, outward: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Arguments and results as of `kernels.selective_scan`, in one launch."""
    (b, t, d), n = x.shape, a.shape[1]
    inputs = [each.contiguous() for each in (x, step, a, inward, outward, state)]
    out, last = x.new_empty(x.shape), state.new_empty(state.shape)
    tile = scan_tile(n)
    selective_scan_kernel[b, triton.cdiv(d, tile["CHANNELS"])](
        *inputs, out, last, t, d, n, **tile, WIDE=_computed_in(x)
    )
    return out, last


def _computed_in(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
