"""Packing of 2-, 3-, 4- and 8-bit integers into streams of 32-bit words.

The stream is little-endian: value k starts at bit k * bits. Fields of 3 bits may cross a word's boundary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tpshard.kernels.quantized.gptq_config import BITS


def pack_stream(values: Tensor, bits: int) -> Tensor:
    """Packs the first dim of `values` [count, ...] (integers below 2**bits) into int32 words [count * bits / 32, ...].

    Raises ValueError where count * bits does not fill whole words.
    """
    count = values.shape[0]
    if bits not in BITS:
        raise ValueError(f"{bits} bits are not supported; supported are {BITS}.")
    if count * bits % 32:
        raise ValueError(f"{count} values of {bits} bits do not fill whole 32-bit words.")
    rest = values.shape[1:]
    words = torch.zeros((count * bits // 32, *rest), dtype=torch.int64, device=values.device)
    # Values at the same place of each run of lcm(bits, 32) bits are shifted together: at most 32 steps.
    per_run, words_per_run = (32, bits) if bits == 3 else (32 // bits, 1)
    wide = values.to(torch.int64).view(count // per_run, per_run, *rest)
    target = words.view(count // per_run, words_per_run, *rest)
    for i in range(per_run):
        word, offset = divmod(i * bits, 32)
        target[:, word] |= wide[:, i] << offset & 0xFFFFFFFF
        if offset + bits > 32:
            target[:, word + 1] |= wide[:, i] >> (32 - offset)
    # 0x80000000 and above are the negative int32 of the same bits.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_stream(words: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_stream`: int32 words [rows, ...] to uint8 values [rows * 32 / bits, ...]."""
    rows = words.shape[0]
    if bits not in BITS:
        raise ValueError(f"{bits} bits are not supported; supported are {BITS}.")
    if rows * 32 % bits or (bits == 3 and rows % 3):
        raise ValueError(f"{rows} words do not hold a whole number of runs of {bits}-bit values.")
    rest = words.shape[1:]
    per_run, words_per_run = (32, bits) if bits == 3 else (32 // bits, 1)
    source = words.view(rows // words_per_run, words_per_run, *rest)
    values = torch.empty((rows // words_per_run, per_run, *rest), dtype=torch.uint8, device=words.device)
    mask = (1 << bits) - 1
    for i in range(per_run):
        word, offset = divmod(i * bits, 32)
        low = source[:, word] >> offset  # arithmetic: the sign bits shifted in are masked or overwritten below
        if offset + bits > 32:
            low = (low & ((1 << (32 - offset)) - 1)) | (source[:, word + 1] << (32 - offset))
        values[:, i] = (low & mask).to(torch.uint8)
    return values.view(rows * 32 // bits, *rest)
