"""Conformer (Gulati et al. 2020): attention and a depthwise convolution between two half-weighted MLPs.

    model: {module: "tpshard.models.conformer:Conformer", args: {features: 32, classes: 16}, seq_len: 128}
    task: frames

Batch norm uses the mean and variance over all frames of a micro-batch, across devices, in training and in evaluation.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.models.dims import name
from tpshard.models.encoder import BothWays
from tpshard.models.families.layers import LayerNorm, Linear


class FeedForward(nn.Module):
    """An MLP after a norm: down(silu(up(norm(x)))).   x: [batch, seq, embed] -> [batch, seq, embed]"""

    def __init__(self, width: int, mlp: int) -> None:
        super().__init__()
        self.norm = LayerNorm(width, 1e-5)
        self.up, self.down = Linear(width, mlp, ("mlp", "embed"), True), Linear(mlp, width, ("embed", "mlp"), True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(name(F.silu(self.up(self.norm(x))), "hidden", "batch", "seq", "mlp"))


class Convolution(nn.Module):
    """The convolution module: gated projection, depthwise convolution of `taps` frames, batch norm, projection.

    x: [batch, seq, embed] -> [batch, seq, embed]
    """

    def __init__(self, width: int, channels: int, taps: int) -> None:
        super().__init__()
        self.taps = taps
        self.norm = LayerNorm(width, 1e-5)
        self.value, self.gate = (Linear(width, channels, ("mlp", "embed"), True) for _ in range(2))
        self.depthwise = nn.Conv1d(channels, channels, taps, padding=taps // 2, groups=channels, bias=False)
        self.batch_norm = nn.BatchNorm1d(channels, track_running_stats=False)
        self.down = Linear(channels, width, ("embed", "mlp"), True)
        self.dims = {
            "depthwise.weight": ("mlp", "", "tap"), "batch_norm.weight": ("mlp",), "batch_norm.bias": ("mlp",)
        }  # fmt: skip
        self.initial_std = {"depthwise.weight": taps**-0.5}

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = self.value(x) * self.gate(x).sigmoid()
        x = self.batch_norm(self.depthwise(x.transpose(1, 2)))
        return self.down(F.silu(x).transpose(1, 2))


class ConformerBlock(nn.Module):
    """One block: half an MLP, attention, convolution and half an MLP, each added to the input; then a norm."""

    def __init__(self, width: int, heads: int, mlp: int, taps: int) -> None:
        super().__init__()
        self.first, self.last = FeedForward(width, mlp), FeedForward(width, mlp)
        self.attention_norm, self.attention = LayerNorm(width, 1e-5), BothWays(width, heads)
        self.convolution, self.norm = Convolution(width, 2 * width, taps), LayerNorm(width, 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.first(x)
        x = x + self.attention(self.attention_norm(x))
        x = x + self.convolution(x)
        return name(self.norm(x + 0.5 * self.last(x)), "residual", "batch", "seq", "embed")


class Conformer(nn.Module):
    """The model: frames [batch, seq, features] -> logits of each frame's class [batch, seq, classes]"""

    inputs = ("frames",)

    def __init__(
        self, features: int, classes: int, layers: int = 2, width: int = 64, heads: int = 4, mlp: int = 256,
        taps: int = 7,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = Linear(features, width, ("embed", "feature"), True)
        self.layers = nn.ModuleList(ConformerBlock(width, heads, mlp, taps) for _ in range(layers))
        self.output = Linear(width, classes, ("vocab", "embed"))

    def forward(self, frames: Tensor) -> Tensor:
        """frames [batch, seq, features] -> logits [batch, seq, classes]."""
        x = self.embed(frames)
        for block in self.layers:
            x = block(x)
        return self.output(x)
