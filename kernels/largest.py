"""The largest of many whole numbers per row, in descending order.

    tpshard::largest(keys int64 [rows, n], count) -> int64 [rows, count]

Keys are not negative, and those of a row differ. On a GPU the count-th largest is found digit by digit of eight bits,
each by one pass over the row (radix selection, Alabi et al. 2012): torch's `topk` takes passes of two bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tpshard.kernels.operation import operation


def _largest(keys: Tensor, count: int) -> Tensor:
    return keys.topk(count).values


def _cuda(keys: Tensor, count: int) -> Tensor:
    from tpshard.kernels import triton_launch  # needs Triton, which CPU builds of torch lack

    with torch.cuda.device(keys.device):
        return triton_launch.largest(keys, count)


def _shape(keys: Tensor, count: int) -> Tensor:
    return keys.new_empty(keys.shape[0], count)


LARGEST = operation("largest(Tensor keys, int count) -> Tensor", _largest, _shape, cuda=_cuda)
