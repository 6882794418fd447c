"""The product of one row with a weight that the CPU's library has packed, in less time and with the library's bits.

The library multiplies one row at about half the speed at which a core can read the weight. On x86 it packs fp32 weights
[n, k] as blocks of 64 outputs, [n / 64, k, 64]: rows of an embedding table, of which the product is a bag per block,
weighted by x. An embedding bag adds its rows in sequence, as does the library up to a number of inputs; `probed` finds
that number, and whether all this holds for the machine at hand.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

Library = Callable[[Tensor, Tensor], Tensor]
"""A function from rows and a packed weight to the library's product."""
BLOCK = 64
"""Outputs of a block."""
SUMMED = (1024, 512, 256)
"""Inputs of a sum in sequence that are tried, if not all are."""
_ROUNDS = 3
"""Timings of each way, of which the least counts."""
_LEAST_BYTES = 1 << 18
"""Bytes of the smallest weight for which another way is looked for: below, calling takes longer than reading."""
_READ_BYTES = 1 << 26
"""Bytes of weights that a timing reads in turn, since a step reads each from memory."""


def product(x: Tensor, packed: Tensor, summed: int) -> Tensor:
    """x [..., k] of one row @ packed [n, k].T -> [..., n] in fp32, in sums of at most `summed` inputs, which are added
    in their order."""
    n, k = packed.shape
    table = _table(torch.ops.mkldnn.data_ptr(packed), n, k)
    indices, starts = _bags(n, k, summed)
    values = x.reshape(1, k).expand(n // BLOCK, k).reshape(-1)
    sums, *_ = torch.ops.aten._embedding_bag_forward_only(table, indices, starts, False, 0, False, values)
    total, *rest = sums.view(n // BLOCK, -1, BLOCK).unbind(1)
    for part in rest:
        total = total + part
    return total.reshape(*x.shape[:-1], n)


def probed(packed: Tensor, x: Tensor, expected: Tensor, library: Library) -> int:
    """The inputs of a sum with which `product` of each row of x [r, k] has the bits of `expected` [r, n], in less time
    than `library(row, packed)`; 0 where there is none."""
    n, k = packed.shape
    read = 4 * n * k
    if packed.dtype != torch.float32 or n % BLOCK or read < _LEAST_BYTES or torch.ops.mkldnn._nbytes(packed) != read:
        return 0
    rows = x.split(1)
    for summed in (k, *(size for size in SUMMED if size < k)):
        if torch.equal(torch.cat([product(row, packed, summed) for row in rows]), expected):
            return summed if _is_faster(packed, rows[0], summed, library) else 0
    return 0


@lru_cache(maxsize=4096)
def _table(address: int, n: int, k: int) -> Tensor:
    """A packed weight's memory as a table [n / 64 * k, 64]; valid as long as the weight lives."""
    memory = (ctypes.c_char * (4 * n * k)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32).view(-1, BLOCK)


@lru_cache(maxsize=64)
def _bags(n: int, k: int, summed: int) -> tuple[Tensor, Tensor]:
    """The table's rows, and where each sum begins: int32 [n / 64 * k], [n / 64 * sums of a block]."""
    blocks = torch.arange(n // BLOCK, dtype=torch.int32) * k
    starts = blocks[:, None] + torch.arange(0, k, summed, dtype=torch.int32)
    return torch.arange(n // BLOCK * k, dtype=torch.int32), starts.reshape(-1)


def _is_faster(packed: Tensor, row: Tensor, summed: int, library: Library) -> bool:
    """Whether bags take less time than the library for weights like this one, which are read in turn."""
    copies = [packed, *(packed.clone() for _ in range(_READ_BYTES // (4 * packed.numel())))]

    def seconds(run: Library) -> float:
        begun = time.thread_time()  # of a busy machine, what this process gets
        for weight in copies:
            run(row, weight)
        return time.thread_time() - begun

    ways = (partial(product, summed=summed), library)
    own, other = (min(times) for times in zip(*([seconds(run) for run in ways] for _ in range(_ROUNDS))))
    return own < other
