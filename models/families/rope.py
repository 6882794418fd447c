"""Rotary position embeddings (Su et al. 2021), with Llama 3's wavelength scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from tpshard.models.families.config import RopeScaling


def rotation(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of the rotation angles of every position.   positions: [batch or 1, seq] -> 2 x [.., seq, 1, head_dim]

    The first half of `sin` is negated, so that `rotate` needs no negation. Nothing is cached, so that a model has no
    buffers to shard or save.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    frequencies = 1.0 / torch.pow(theta, exponents)
    if scaling is not None:
        frequencies = _stretch(frequencies, scaling)
    angles = positions.unsqueeze(-1).unsqueeze(-1).float() * frequencies
    cos, sin = torch.cos(angles), torch.sin(angles)
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the pairs (i, i + head_dim / 2) of every head.   x: [batch, seq, heads, head_dim] -> the same"""
    cos, sin = rotation
    return x * cos + torch.roll(x, x.shape[-1] // 2, -1) * sin


def _stretch(frequencies: Tensor, s: RopeScaling) -> Tensor:
    """Frequencies with long wavelengths scaled by `factor`, short ones unchanged, and a linear mix in between."""
    turns = frequencies * (s.original_max_seq / (2 * math.pi))
    unscaled = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * ((1.0 - unscaled) / s.factor + unscaled)
