"""A user's module in layers, as GPTQ quantizes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from tpshard.kernels.quantized.gptq_solver import Heads
from tpshard.kernels.quantized.quantized import Quantized
from tpshard.models.families.layers import Linear
from tpshard.models.folders.module_folder import config_of_module
from tpshard.models.layer_stacks import layer_stacks
from tpshard.models.layered.layered_model import (
    ExpertMatrices,
    LayeredModel,
    Matrix,
    NotQuantizable,
    Read,
    fits_gptq,
)


class ModuleLayers(LayeredModel):
    """A module on `meta` of the class `path`, called with `args`. Its folder has the names of its parameters.

    The linears of its lists of layers are quantized: `nn.Linear` and `families.layers.Linear`. NotQuantizable where it
    has no such list.
    """

    def __init__(self, path: str, args: Mapping[str, Any], model: nn.Module) -> None:
        self._named, self.model = (path, args), model.eval()  # dropout is for training alone
        self.stacks = tuple(stack.path for stack in layer_stacks(model))
        if not self.stacks:
            raise NotQuantizable(f"{type(model).__name__} has no list of layers, which is quantized layer by layer")
        self.parameters = [name for name, _ in model.named_parameters()]
        self.matrices = {
            name: Matrix(name, fits_gptq(*self.weight_of(module).shape), f"{name}.weight")
            for name, module in model.named_modules()
            if name.startswith(tuple(f"{path}." for path in self.stacks)) and isinstance(module, (nn.Linear, Linear))
        }

    def experts(self, layer: nn.Module, prefix: str) -> ExpertMatrices | None:
        return None

    def heads(self, name: str) -> Heads | None:
        return None

    def stored(self, quantized: Mapping[str, Quantized]) -> Iterator[tuple[str, Quantized]]:
        for name, linear in quantized.items():
            yield name, linear.to("cpu")

    def dense(self, names: Iterable[str], read: Read) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, read(name)

    def config_json(self, others: Mapping[str, Any]) -> dict[str, Any]:
        return {**others, **config_of_module(*self._named), "dtype": "float16"}
