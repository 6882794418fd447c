"""The dtype in which kernels compute and sum."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which values of x's dtype are computed and summed: fp64 for fp64, else fp32."""
    return torch.promote_types(x.dtype, torch.float32)
