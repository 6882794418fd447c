"""A 3-D U-Net (Cicek et al. 2016) with group norm, whose volumes can be sharded along their depth.

    model: {module: "tpshard.models.unet:UNet3D", args: {classes: 2}, seq_len: 16}
    task: volumes
    sharding: {rules: {batch: [dp, fsdp], depth: spatial}}

With a sharded depth, devices exchange the boundary slices that convolutions read, and reduce group norm's statistics.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_KERNEL = ("", "", "")


class Convolved(nn.Module):
    """Two times a 3 x 3 x 3 convolution, group norm and ReLU.

    x: [batch, inputs, depth, height, width] -> [batch, outputs, depth, height, width]
    """

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.first = nn.Conv3d(inputs, outputs, 3, padding=1, bias=False)
        self.second = nn.Conv3d(outputs, outputs, 3, padding=1, bias=False)
        self.first_norm, self.second_norm = nn.GroupNorm(groups, outputs), nn.GroupNorm(groups, outputs)
        self.dims: dict[str, tuple[str, ...]] = {
            f"{one}.weight": ("outputs", "inputs", *_KERNEL) for one in ("first", "second")
        }
        for norm in ("first_norm", "second_norm"):
            self.dims |= {f"{norm}.weight": ("outputs",), f"{norm}.bias": ("outputs",)}
        self.initial_std = {
            "first.weight": (27 * inputs / 2) ** -0.5, "second.weight": (27 * outputs / 2) ** -0.5
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(x)))


class UNet3D(nn.Module):
    """The model: volume [batch, channels, depth, height, width] -> logits [batch, classes, depth, height, width]

    Each of `levels` halves depth, height and width, and doubles the number of channels.
    """

    inputs = ("volume",)

    def __init__(self, classes: int, channels: int = 1, width: int = 8, levels: int = 2, groups: int = 4) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.enter = Convolved(channels, width, groups)
        self.down = nn.ModuleList(nn.Conv3d(a, b, 2, stride=2, bias=False) for a, b in pairwise(widths))
        self.inner = nn.ModuleList(Convolved(b, b, groups) for b in widths[1:])
        self.up = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, stride=2, bias=False) for a, b in pairwise(widths))
        self.outer = nn.ModuleList(Convolved(2 * a, a, groups) for a in widths[:-1])
        self.output = nn.Conv3d(width, classes, 1, bias=False)
        self.dims = {"output.weight": ("outputs", "inputs", *_KERNEL)}
        self.initial_std = {"output.weight": width**-0.5}
        for i, (a, b) in enumerate(pairwise(widths)):
            self.dims |= {
                f"down.{i}.weight": ("outputs", "inputs", *_KERNEL), f"up.{i}.weight": ("inputs", "outputs", *_KERNEL)
            }  # fmt: skip
            self.initial_std |= {f"down.{i}.weight": (8 * a) ** -0.5, f"up.{i}.weight": b**-0.5}

    def forward(self, volume: Tensor) -> Tensor:
        """volume [batch, channel, depth, height, width] -> logits [batch, classes, depth, height, width]."""
        x, skipped = self.enter(volume), []
        for down, inner in zip(self.down, self.inner):
            skipped.append(x)
            x = inner(down(x))
        for i in reversed(range(len(self.up))):
            x = self.outer[i](torch.cat([skipped[i], self.up[i](x)], 1))
        return self.output(x)
