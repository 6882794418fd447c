"""Weights as a padded model takes them: the model's own, and 0 beyond them (see `programs.padding`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels.quantized import Quantized, longer
from tpshard.models.config import ModelConfig
from tpshard.serve.job import Weights


def pad(weights: Weights, config: ModelConfig) -> Weights:
    """The parameters of `config`, whose sizes are at least those of the weights' own model."""
    if config == weights.config:
        return weights
    own, shapes = weights.config.shapes, config.shapes

    def block(name: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        there = [max(0, min(size, n - start)) for n, start, size in zip(own[name], starts, sizes)]
        if 0 in there:
            return torch.zeros(*sizes)
        missing = [x for size, got in zip(reversed(sizes), reversed(there)) for x in (0, size - got)]
        return F.pad(weights.block(name, starts, there), missing)

    def quantized(name: str) -> Quantized | None:
        found = weights.quantized(name)
        return None if found is None else found.padded(*reversed(shapes[name]))

    def group(name: str) -> Tensor | None:
        found = weights.group(name)
        return None if found is None else longer(found, shapes[name][1])

    return Weights(config, block, quantized, group)
