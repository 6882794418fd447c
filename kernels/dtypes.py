"""The dtype in which kernels compute and sum, and the names of dtypes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which values of x's dtype are computed and summed: fp64 for fp64, else fp32."""
    return torch.promote_types(x.dtype, torch.float32)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
