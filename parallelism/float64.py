"""Runs what is written for float32 in float64: a test can ask for 1e-10, far above rounding and far below a fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

BOUND = 1e-10
"""Relative distance between two ways to compute the same in float64: orders of sums differ by some 1e-15."""


class _Wide(TorchDispatchMode):
    """Every operation that asks for float32 gets float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_wide_dtype, (args, kwargs or {}))
        return func(*args, **kwargs)


def _wide_dtype(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


@contextmanager
def float64() -> Iterator[None]:
    """Within it models and programs of float32 compute in float64; tensors that come in must be float64 themselves."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)


def distance(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||, infinite where dtypes are not both float64 or shapes differ."""
    if found.dtype != torch.float64 or expected.dtype != torch.float64 or found.shape != expected.shape:
        return float("inf")
    scale = float(expected.norm())
    gap = float((found - expected).norm())
    return gap / scale if scale else (0.0 if gap == 0 else float("inf"))
