"""Running float32 programs in float64, so that tests can compare results within a relative distance of 1e-10."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BOUND = 1e-10
"""The largest relative distance of two results that count as equal. Another order of sums gives about 1e-15."""


class _Wide(TorchDispatchMode):
    """A dispatch mode that gives float64 to every operation that asks for float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _wide_dtype(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide_dtype, args), **kwargs)


def _wide_dtype(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


@contextmanager
def float64() -> Iterator[None]:
    """A context in which float32 models and programs compute in float64; their inputs must be float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)


def distance(actual: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """||actual - expected|| / max(||expected||, least), infinite where dtypes are not both float64 or shapes differ."""
    if actual.dtype != torch.float64 or expected.dtype != torch.float64 or actual.shape != expected.shape:
        return float("inf")
    scale = max(float(expected.norm()), least)
    gap = float((actual - expected).norm())
    return gap / scale if scale else (0.0 if gap == 0 else float("inf"))
