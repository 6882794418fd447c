"""RMSNorm as one operation, which can store its result in a permuted order for the linear that reads it.

    tpshard::rms_norm_permuted(x [..., width], weight [width], order [width] | None, eps) -> [..., width]
    tpshard::add_rms_norm(x [..., width], y [..., width], weight, order | None, eps) -> (x + y, the norm of x + y)

Computed in fp32 but for the multiplication by `weight` (Zhang and Sennrich 2019): out[..., i] = norm(x)[..., order[i]].
"""

from __future__ import annotations

import torch
from torch import Tensor
from tpshard.kernels.operation import operation


def rms_norm(x: Tensor, weight: Tensor, order: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of x [..., width] in plain torch, permuted by `order` [width]."""
    normed = torch.rms_norm(x, x.shape[-1:], None, eps) * weight.to(x.dtype)
    return normed if order is None else normed.index_select(-1, order)


def _cuda(x: Tensor, weight: Tensor, order: Tensor | None, eps: float) -> Tensor:
    from tpshard.kernels import triton_launch  # needs Triton, which CPU builds of torch lack

    with torch.cuda.device(x.device):
        return triton_launch.rms_norm(x if x.dim() > 1 else x[None], weight, order, eps).view(x.shape)


def _shape(x: Tensor, weight: Tensor, order: Tensor | None, eps: float) -> Tensor:
    return torch.empty_like(x)


NORM = operation(
    "rms_norm_permuted(Tensor x, Tensor weight, Tensor? order, float eps) -> Tensor", rms_norm, _shape, cuda=_cuda
)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, order: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """`tpshard::add_rms_norm` in plain torch."""
    total = x + y
    return total, rms_norm(total, weight, order, eps)


def _add_cuda(x: Tensor, y: Tensor, weight: Tensor, order: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    from tpshard.kernels import triton_launch

    with torch.cuda.device(x.device):
        return triton_launch.add_rms_norm(x, y, weight, order, eps)


def _add_shapes(x: Tensor, y: Tensor, weight: Tensor, order: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


ADD_NORM = operation(
    "add_rms_norm(Tensor x, Tensor y, Tensor weight, Tensor? order, float eps) -> (Tensor, Tensor)", add_rms_norm,
    _add_shapes, cuda=_add_cuda,
)  # fmt: skip
