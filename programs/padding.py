"""An MLP whose columns tensor parallelism does not divide, made wider by columns that are always 0.

A program gives every device an equal part. So gate and up get further outputs of weight and bias 0, which silu(0) * 0
and gelu(0) leave at 0, and down gets rows of 0 to read them: the logits stay as they are. Rows of a quantized down are
cut where a group ends: of 231 groups two devices get 116 and 115, and the second one a group of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from tpshard.models.config import ModelConfig
from tpshard.programs.layouts import Groups

ALIGNED = 32
"""Columns of a device come in multiples of this where they do not come in groups: what kernels take whole."""


def shared_rows(config: ModelConfig, group: Groups) -> int:
    """How many neighbouring inputs of `down` share scales once they are sorted; 1 where a model has no such groups."""
    found = [group(name) for name, dims in config.parameters.items() if dims[1:] == ("mlp",)]
    sizes = [torch.bincount(own.long()) for own in found if own is not None]
    return math.lcm(*(int(size.max()) for size in sizes if len(size) > 1))


def padded(config: ModelConfig, tp: int, shared: int = 1) -> ModelConfig:
    """`config` with an MLP that `tp` devices divide, between groups of `shared` inputs where each device can have one.

    The same `config` where they divide it as it is.
    """
    each = shared if -(-config.mlp // shared) >= tp else 1
    if tp == 1 or config.mlp % (tp * each) == 0:
        return config
    whole = tp * (each if each > 1 else ALIGNED)
    return replace(config, mlp=-(-config.mlp // whole) * whole)


def notes(config: ModelConfig, wider: ModelConfig, ways: Callable[[str], int]) -> list[str]:
    """What is not cut as the devices would have it: the MLP that `padded` made wider, and a vocabulary that stays
    whole. `ways`: dim -> devices that it is spread over."""
    said = []
    if config.mlp != wider.mlp:
        parts = f"equal parts for tp {ways('mlp')}"
        said.append(f"MLP padded from {config.mlp:,} to {wider.mlp:,} columns, {parts}")
    if config.vocab % ways("vocab"):
        why = f"tp {ways('vocab')} does not divide {config.vocab:,}"
        said.append(f"each device holds and computes the whole vocabulary: {why}")
    return said
