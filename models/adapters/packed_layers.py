"""Layers with quantized weights: a module keeps its class, and its `weight` is made dense whenever it is read."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from tpshard.kernels.quantized.dequantize import DEQUANTIZE, DTYPES, Coding


class PackedLayer(nn.Module):
    """What the class of a layer with a quantized weight has beside its own. The tensors are parameters without a
    gradient, so that they are stored and sharded like others."""

    coding: Coding
    codes: Tensor
    scales: Tensor
    zeros: Tensor
    dense_dtype: torch.dtype

    @property
    def weight(self) -> Tensor:
        """The dense weight in the dtype of the computation."""
        group: Tensor | None = self.group if self.coding.ordered else None  # type: ignore[assignment]
        dense: Tensor = DEQUANTIZE(self.codes, self.scales, self.zeros, group, self.coding.bits, self.dense_dtype)
        return dense


@cache
def _packed_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (PackedLayer, cls), {})


def pack_layer(model: nn.Module, path: str, coding: Coding) -> None:
    """Replaces the weight of a layer of a model on `meta`."""
    module: Any = model.get_submodule(path)
    dense = module._parameters.pop("weight")
    module.__class__ = _packed_class(module.__class__)
    module.coding, module.dense_dtype = coding, dense.dtype
    for leaf, shape in coding.shapes(dense.shape).items():
        empty = torch.empty(shape, dtype=DTYPES[leaf], device="meta")
        module.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))


def dequantize_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Sets the dtype in which the quantized weights of a model are used."""
    for module in model.modules():
        if isinstance(module, PackedLayer):
            module.dense_dtype = dtype
