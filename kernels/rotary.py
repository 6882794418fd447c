"""Rotary positions of a server's queries and keys as one operation.

    tpshard::rotate(xs: each [1, t, heads, d], cos [1, t, 1, d], sin [1, t, 1, d]) -> one result per x, in its shape

x * cos + roll(x, d / 2) * sin over the last dim, each product rounded to x's dtype (Su et al. 2021, in halves; the
first half of sin is negated).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from tpshard.kernels.operation import operation


def rotate(xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """`tpshard::rotate` in plain torch."""
    return [x * cos + x.roll(x.shape[-1] // 2, -1) * sin for x in xs]


def _cuda(xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    from tpshard.kernels import triton_launch  # needs Triton, which CPU builds of torch lack

    with torch.cuda.device(cos.device):
        return triton_launch.rotate(xs, cos, sin)


def _shapes(xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in xs]


ROTATE = operation("rotate(Tensor[] xs, Tensor cos, Tensor sin) -> Tensor[]", rotate, _shapes, cuda=_cuda)
