"""Random numbers that are the same on every mesh.

An element's number depends only on the seed, the number of the draw within the function, and its global position.

    tpshard::random(seed [] int64, number, size, begins, strides, dtype, row) -> [size]

Draw `number` is the stream of SplitMix64 (Steele, Lea and Flood, 2014) whose state is a hash of the seed and the
number; the element at global position p gets the stream's p-th number. `begins` is where the part begins in each dim of
the whole; `strides` are the row-major strides of the whole. Floating dtypes give numbers in [0, 1) with all bits of
their mantissa, int64 gives 63 bits.

A training step runs in micro-batches, and other meshes divide its rows differently. A draw for the rows of a batch
therefore depends on the row's place in the step: `row` is the number of positions of dim 0 per row (0: dim 0 is not
made of rows), and the seed has five numbers, see `step_seed`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tpshard.kernels.splitmix64 import FIRST, GAMMA, SECOND, to_signed

_library = torch.library.Library("tpshard", "FRAGMENT")
_library.define("draw(int[] size, ScalarType dtype) -> Tensor")
_library.define(
    "random(Tensor seed, int number, int[] size, int[] begins, int[] strides, ScalarType dtype, int row=0) -> Tensor"
)
DRAW = torch.ops.tpshard.draw.default
"""The op that decompositions call; during capture it becomes the next draw from the seed."""
RANDOM = torch.ops.tpshard.random.default
SEED = "seed"
"""The name of the seed input of a program that draws."""

_CHUNK = 1 << 16
"""Elements computed at a time, so that intermediates stay in a core's cache."""
_MASK = (1 << 64) - 1
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.int64: 63}


def mix_seeds(*numbers: int) -> int:
    """Hashes several integers into one int64, such as the seed and the micro-batch of a step."""
    state = 0
    for number in numbers:
        state = (state + number + GAMMA) & _MASK
        state = ((state ^ (state >> 30)) * FIRST) & _MASK
        state = ((state ^ (state >> 27)) * SECOND) & _MASK
        state ^= state >> 31
    return to_signed(state)


def step_seed(seed: int, micro: int, rows: int, apart: int) -> Tensor:
    """The seed input of a program for one micro-batch of a step, int64 [5].

    It holds the keys of the step and of the micro-batch, the rows of a data rank in it, the distance between the rows
    of two data ranks in the step, and the first row of the data rank.
    """
    return torch.tensor([mix_seeds(seed), mix_seeds(seed, micro), rows, apart, micro * rows])


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts unsigned 64-bit words, stored as int64, right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The output function of SplitMix64, on unsigned 64-bit words; not in place, so that a compiler can fuse it."""
    x = (x ^ _shift_right(x, 30)) * to_signed(FIRST)
    x = (x ^ _shift_right(x, 27)) * to_signed(SECOND)
    return x ^ _shift_right(x, 31)


def random(
    seed: Tensor, number: int, size: Sequence[int], begins: Sequence[int], strides: Sequence[int], dtype: torch.dtype,
    row: int = 0,
) -> Tensor:  # fmt: skip
    """The random numbers of a device's part of a draw (`tpshard::random`), in operations that a compiler can fuse."""
    state = seed if not seed.dim() else seed[0 if row else 1]
    key = _mix(_mix(state + to_signed(GAMMA)) + to_signed(number * GAMMA & _MASK))
    place = torch.ones((), dtype=torch.int64, device=seed.device)
    for d, (n, begin, stride) in enumerate(zip(size, begins, strides)):
        along = torch.arange(n, dtype=torch.int64, device=seed.device) + begin
        if d == 0 and row:
            rows, apart, first = (seed[i] * row for i in (2, 3, 4))
            along = along // rows * apart + first + along % rows
        place = place.unsqueeze(-1) + along * stride
    # the key first: inductor treats products of positions as addresses, and its kernels fail where they overflow
    bits = _shift_right(_mix((place + key) * to_signed(GAMMA)), 64 - _BITS[dtype])
    if dtype is torch.int64:
        return bits
    wide = torch.promote_types(dtype, torch.float32)
    return (bits.to(wide) * 2.0 ** -_BITS[dtype]).to(dtype)


def _in_pieces(
    seed: Tensor, number: int, size: Sequence[int], begins: Sequence[int], strides: Sequence[int], dtype: torch.dtype,
    row: int = 0,
) -> Tensor:  # fmt: skip
    """Computes `random` in chunks of `_CHUNK` elements on a CPU, so that intermediates stay in a core's cache."""
    d = next((d for d, n in enumerate(size) if n > 1), None)
    if seed.device.type != "cpu" or d is None or math.prod(size) <= _CHUNK:
        return random(seed, number, size, begins, strides, dtype, row)
    rows = max(1, _CHUNK // math.prod(size[d + 1 :]))
    out = torch.empty(tuple(size), dtype=dtype)
    for start in range(0, size[d], rows):
        part, begin = list(size), list(begins)
        part[d], begin[d] = min(rows, size[d] - start), begins[d] + start
        out.narrow(d, start, part[d]).copy_(_in_pieces(seed, number, part, begin, strides, dtype, row))
    return out


def _draw_outside_capture(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    raise RuntimeError("a draw has a seed only while a function is captured")


_library.impl("draw", _draw_outside_capture, "CompositeExplicitAutograd")
_library.impl("random", _in_pieces, "CompositeExplicitAutograd")


@torch.library.register_fake("tpshard::random", lib=_library)
def _(seed: Tensor, number: int, size: Any, begins: Any, strides: Any, dtype: torch.dtype, row: int = 0) -> Tensor:
    return torch.empty(size, dtype=dtype, device=seed.device)


def strides_of(shape: Sequence[int]) -> list[int]:
    """The row-major strides of a shape."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]
