"""The initial values of a transformers class without weights, by the class's own constructor and rule."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from tpshard.models.construct import CONSTANTS, Constructor, TapeEntry
from tpshard.models.initialization import Initial, initial_block
from tpshard.models.transformers.architecture import Architecture


class ClassValues:
    """The initial values of a transformers model, as its class's constructor and `init_weights` compute them.

    Constants, and what is computed from constants (Mamba's `A_log`), are transformers' own bit for bit. Of a parameter
    that one operation fills with normal or uniform numbers, a rank computes its block alone, with numbers of that
    distribution. Any other rule (truncated normals, Mamba's biases of time steps) computes the whole parameter, with
    numbers drawn from `seed`. All are the same on every mesh.
    """

    def __init__(self, architecture: Architecture, seed: int):
        self.architecture, self.seed = architecture, seed
        self._last: tuple[str, Tensor] | None = None
        """The value that was computed last, since a parameter is read block after block."""

    def block(self, name: str, starts: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A block of a parameter's initial value."""
        begun = self._begun(name)
        if isinstance(begun, Initial):
            return initial_block({name: begun}, name, starts, sizes, self.seed, dtype)
        return begun[tuple(slice(start, start + size) for start, size in zip(starts, sizes))].to(dtype, copy=True)

    def _begun(self, name: str) -> Initial | Tensor:
        shape = self.architecture.shapes[name]
        if not self._constructor.sets(name):
            config: Any = self.architecture.config.get_text_config()
            spread = float(getattr(config, "initializer_range", 0.02) or 0.02)
            return Initial(shape, float(len(shape) < 2), spread if len(shape) > 1 else 0.0)
        if (filled := self._constructor.filled(name)) is not None:
            return _distribution(shape, filled)
        if self._last is None or self._last[0] != name:
            value = self._constructor.value(name)
            assert value is not None
            self._last = name, value
        return self._last[1]

    @cached_property
    def _constructor(self) -> Constructor:
        from transformers import initialization

        config = copy.deepcopy(self.architecture.config)
        with mock.patch.dict(initialization.TORCH_INIT_FUNCTIONS, trunc_normal_=_truncated):
            return Constructor(lambda: self.architecture.cls(config), self.seed, keyed=True)


def _distribution(shape: tuple[int, ...], filled: Sequence[TapeEntry]) -> Initial:
    """The distribution of a parameter that one operation fills, and others with constants in parts."""
    (_, *numbers), law = filled[0].args, filled[0].func
    fixed = tuple(
        (target.offset, target.offset + math.prod(target.size), float(value[0]) if value else 0.0)
        for target, *value in (entry.args for entry in filled[1:])
    )
    if law in CONSTANTS:
        return Initial(shape, float(numbers[0]) if numbers else 0.0, 0.0, fixed=fixed)
    low, high = (*numbers, *(0.0, 1.0)[len(numbers) :])[:2]
    if law is torch.ops.aten.normal_.default:
        return Initial(shape, float(low), float(high), "normal", fixed)
    return Initial(shape, (low + high) / 2, (high - low) / math.sqrt(12), "uniform", fixed)


def _truncated(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, generator: Any = None
) -> Tensor:
    """torch's `trunc_normal_` by the inverse of its distribution; torch draws until it has read that all values fit."""
    low, high = (math.erf((edge - mean) / (std * math.sqrt(2))) for edge in (a, b))
    with torch.no_grad():
        return tensor.uniform_(low, high).erfinv_().mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)
