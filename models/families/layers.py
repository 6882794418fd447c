"""The layers that all models share. They allocate parameters; `models.init` gives them values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.kernels.fp8.fp8 import fp8_linear
from tpshard.models.families.config import ModelConfig


class Linear(nn.Module):
    """A linear layer: x @ weight.T + bias.   x: [..., inputs] -> [..., outputs]; `dims` names (outputs, inputs)."""

    def __init__(self, inputs: int, outputs: int, dims: tuple[str, ...], bias: bool = False) -> None:
        super().__init__()
        self.dims = {"weight": dims} | ({"bias": dims[:1]} if bias else {})
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


def multiply_in_fp8(model: nn.Module) -> None:
    """Lets the linear layers of a model's blocks, `layers.N`, multiply in fp8; embedding and head are not in them."""
    for path, module in model.named_modules():
        if isinstance(module, Linear) and path.startswith("layers."):
            module.product = fp8_linear


class Experts(nn.Module):
    """The weights of a stack of linear layers [expert, outputs, inputs], whose dims `dims` names."""

    def __init__(self, sizes: Sequence[int], dims: tuple[str, ...]) -> None:
        super().__init__()
        self.dims = {"weight": dims}
        self.weight = nn.Parameter(torch.empty(*sizes))


class Embedding(nn.Module):
    """An embedding table of initial deviation `std`.   tokens: [...] -> [..., width]; `dims` names (rows, width).

    Lookups of the token `padding` give its row no gradient.
    """

    def __init__(self, rows: int, width: int, dims: tuple[str, ...], std: float, padding: int | None = None) -> None:
        super().__init__()
        self.dims, self.padding = {"weight": dims}, padding
        self.initial_std = {"weight": std}
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight, self.padding)


class RMSNorm(nn.Module):
    """RMSNorm over the last dim, in fp32 (Zhang and Sennrich 2019): x / rms(x) * weight; `dims` names its dim."""

    def __init__(self, width: int, eps: float, dims: tuple[str, ...] = ("embed",)) -> None:
        super().__init__()
        self.eps = eps
        self.dims = {"weight": dims}
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        unit = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)
        return unit.to(x.dtype) * self.weight


class LayerNorm(nn.Module):
    """LayerNorm over the last dim, in fp32 (Ba et al. 2016): (x - mean) / std * weight + bias."""

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


class Parts:
    """Builds the modules of a configuration by name, below one path of the model.

    `Parts(c).inside("layers.0.mlp")("gate")` is the module `layers.0.mlp.gate`, its parameters not initialized.
    """

    def __init__(self, config: ModelConfig, place: str = "") -> None:
        self.config, self.place = config, place

    def inside(self, name: str) -> Parts:
        return Parts(self.config, f"{self.place}{name}.")

    def optional(self, name: str, *, std: float = 0.0) -> nn.Module | None:
        """The module of that name, or None where the configuration has none."""
        return self(name, std=std) if self.place + name in self.config.leaves else None

    def __call__(self, name: str, *, std: float = 0.0) -> nn.Module:
        """The module of that name; KeyError if the configuration has none. `std` is the deviation of a table."""
        c, leaf = self.config, self.config.leaves[self.place + name]
        sizes = [c.size(dim, leaf) for dim in leaf.dims]
        match leaf.kind:
            case "linear":
                return Linear(sizes[1], sizes[0], leaf.dims, bool(leaf.bias))
            case "experts":
                return Experts(sizes, leaf.dims)
            case "table":
                padding = c.pad_token if leaf.dims[0] == "vocab" else None
                return Embedding(sizes[0], sizes[1], leaf.dims, std, padding)
            case "rms_norm":
                return RMSNorm(sizes[0], c.norm_eps, leaf.dims)
            case "layer_norm":
                return LayerNorm(sizes[0], c.norm_eps)
