"""Pads an MLP whose width tensor parallelism does not divide, with columns that are always 0.

A program gives every device an equal part. So gate and up get extra outputs with weight and bias 0, for which silu(0) *
0 and gelu(0) are 0, and down gets rows of 0 for them: the logits do not change. Rows of a quantized down are divided
between groups: of 231 groups two devices get 116 and 115, and the second one a group of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from tpshard.models.families.config import ModelConfig
from tpshard.programs.server.act_order import Groups

ALIGNED = 32
"""A device's columns are a multiple of this where there are no groups, as kernels prefer."""


def shared_rows(dims: Mapping[str, Sequence[str]], group: Groups) -> int:
    """The number of neighbouring inputs of `down` that share scales after sorting; 1 for a model without such groups.
    dims: the names of each parameter's dims."""
    indices = [group(name) for name, named in dims.items() if tuple(named[1:]) == ("mlp",)]
    sizes = [torch.bincount(own.long()) for own in indices if own is not None]
    return math.lcm(*(int(size.max()) for size in sizes if len(size) > 1))


def padded_mlp(config: ModelConfig, tp: int, shared: int = 1) -> int:
    """The width of the MLP of `config` that `tp` devices divide, between groups of `shared` inputs if each can get one:
    its own if they divide that already."""
    each = shared if -(-config.mlp // shared) >= tp else 1
    if tp == 1 or config.mlp % (tp * each) == 0:
        return config.mlp
    whole = tp * (each if each > 1 else ALIGNED)
    return -(-config.mlp // whole) * whole


def notes(config: ModelConfig, wider: ModelConfig, ways: Callable[[str], int]) -> list[str]:
    """Notes on padding: an MLP that `padded_mlp` made wider, and a vocabulary that every device holds whole.

    ways: the number of devices over which a dim is sharded.
    """
    sentences = []
    if config.mlp != wider.mlp:
        parts = f"equal parts for tp {ways('mlp')}"
        sentences.append(f"MLP padded from {config.mlp:,} to {wider.mlp:,} columns, {parts}")
    if config.vocab % ways("vocab"):
        why = f"tp {ways('vocab')} does not divide {config.vocab:,}"
        sentences.append(f"each device holds and computes the whole vocabulary: {why}")
    return sentences
