"""The few layers that every model here is made of. Parameters are allocated, not initialised: see `models.init`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """x @ weight.T + bias.   x: [..., inputs] -> [..., outputs]; dims names (outputs, inputs)."""

    def __init__(self, inputs: int, outputs: int, dims: tuple[str, str], bias: bool = False) -> None:
        super().__init__()
        self.dims = {"weight": dims} | ({"bias": dims[:1]} if bias else {})
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Rows of a table that begins with deviation `std`.   tokens: [...] -> [..., width]; dims names (rows, width)."""

    def __init__(self, rows: int, width: int, dims: tuple[str, str], std: float) -> None:
        super().__init__()
        self.dims = {"weight": dims}
        self.initial_std = {"weight": std}
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, computed in fp32 (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.dims = {"weight": ("embed",)}
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        unit = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)
        return unit.to(x.dtype) * self.weight


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias over the last dim, computed in fp32 (Ba et al. 2016)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.dims = {"weight": ("embed",), "bias": ("embed",)}
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        unit = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + self.eps)
        return (unit * self.weight.float() + self.bias.float()).to(x.dtype)
