"""Reading a GPTQ folder as a dense one: `P.weight` is computed from `P.qweight`, `P.scales`, ... when it is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from tpshard.kernels.gptq_config import GPTQConfig
from tpshard.kernels.gptq_format import SUFFIXES, GPTQFolder
from tpshard.kernels.quantized import Quantized
from tpshard.models.config import ModelConfig
from tpshard.models.hf_files import Tensors
from tpshard.models.hf_names import Home, hf_modules


class DequantizedTensors(Tensors):
    """The tensors of a GPTQ folder, with every quantized linear dequantized to a dense fp16 weight [outputs, inputs].

    ValueError where the tensors contradict quantization_config.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)  # first: it refuses files outside the folder
        self._quantized = GPTQFolder(self.folder)
        if not self._quantized.modules:
            raise ValueError(f"{self.folder} has a quantization_config, but no `qweight`")
        self.coded_weights = {f"{module}.weight": module for module in self._quantized.modules}
        """The quantized linear of each dequantized weight."""
        self._hidden = {f"{module}.{suffix}" for module in self._quantized.modules for suffix in SUFFIXES[:-1]}
        self._dense = lru_cache(maxsize=1)(self._dequantize)  # the blocks of one parameter are read in a row
        for weight in self.coded_weights:
            if super().__contains__(weight):
                raise ValueError(f"{self.folder} holds `{weight}` both dense and quantized")

    def _dequantize(self, module: str) -> Tensor:
        return self._quantized.linear(module).dequantize().T.contiguous()

    def __contains__(self, name: object) -> bool:
        return name in self.coded_weights or (name not in self._hidden and super().__contains__(name))

    def names(self) -> list[str]:
        return sorted([*self.coded_weights, *(name for name in super().names() if name not in self._hidden)])

    def file(self, name: str) -> str:
        module = self.coded_weights.get(name)
        return super().file(name if module is None else f"{module}.qweight")

    def shape(self, name: str) -> tuple[int, ...]:
        module = self.coded_weights.get(name)
        if module is None:
            return super().shape(name)
        config = self._quantized.config.of(module)
        assert config is not None
        words, outputs = super().shape(f"{module}.qweight")
        return outputs, words * 32 // config.bits

    def dtype(self, name: str) -> str:
        return "F16" if name in self.coded_weights else super().dtype(name)

    def block(self, name: str, starts: Sequence[int] = (), sizes: Sequence[int] = ()) -> Tensor:
        module = self.coded_weights.get(name)
        if module is None:
            return super().block(name, starts, sizes)
        cut = tuple(slice(start, start + size) for start, size in zip(starts, sizes))
        return self._dense(module)[cut].clone()


def quantizable(config: ModelConfig) -> frozenset[str]:
    """The matrices of the layers that GPTQ files can hold: those whose inputs and outputs are multiples of 32.

    Parameters that share a fused matrix in the folder are quantized together or not at all.
    """
    homes, shapes, together = hf_modules(config), config.shapes, dict[str, list[str]]()
    for name, shape in shapes.items():
        module, _, leaf = name.rpartition(".")
        if (
            name.startswith("layers.")
            and leaf == "weight"
            and len(shape) == 2
            and "choice" not in config.parameters[name]
        ):
            together.setdefault(homes[module].module, []).append(name)
    return frozenset(
        name
        for names in together.values()
        for name in names
        if shapes[name][1] % 32 == 0 and sum(shapes[other][0] for other in names) % 32 == 0
    )


class QuantizedModules:
    """The quantized linears of a GPTQ folder by the names of parameters, which `module_of` maps to the folder's."""

    def __init__(self, folder: str | os.PathLike[str], module_of: Callable[[str], str | None]) -> None:
        self._folder, self._module_of = GPTQFolder(Path(folder)), module_of
        self.settings = self._folder.config

    def settings_of(self, name: str) -> GPTQConfig | None:
        """How a parameter is quantized; None where it is not."""
        module = self._module_of(name)
        return None if module is None else self._folder.config.of(module)

    def linear(self, name: str) -> Quantized | None:
        """A weight's quantized form, whole; None for a parameter that is dense."""
        module = self._module_of(name)
        return None if module is None else self._folder.linear(module)

    def group(self, name: str) -> Tensor | None:
        """The group of each input of a weight, int32 [inputs]; None for a parameter that is dense."""
        module = self._module_of(name)
        return None if module is None else self._folder.group(module)


class QuantizedParameters:
    """The quantized linears of a GPTQ folder, by the model's parameter names (`layers.0.mlp.up.weight`)."""

    def __init__(self, folder: str | os.PathLike[str], config: ModelConfig) -> None:
        self._folder, self._homes = GPTQFolder(Path(folder)), hf_modules(config)
        self.settings = self._folder.config
        self._modules = set(self._folder.modules)

    def _home(self, name: str) -> Home | None:
        module, _, leaf = name.rpartition(".")
        home = self._homes.get(module)
        return home if home is not None and leaf == "weight" and home.module in self._modules else None

    def settings_of(self, name: str) -> GPTQConfig | None:
        """The quantization settings of a parameter; None for a dense one."""
        home = self._home(name)
        return None if home is None else self._folder.config.of(home.module)

    def linear(self, name: str) -> Quantized | None:
        """The whole quantized weight of a parameter; None for a dense one."""
        home = self._home(name)
        if home is None:
            return None
        linear = self._folder.linear(home.module)
        return linear if home.part is None else linear.take_columns(home.take(torch.arange(linear.outputs)))

    def group(self, name: str) -> Tensor | None:
        """The group of each input of a weight, int32 [inputs]; None for a dense one."""
        home = self._home(name)
        return None if home is None else self._folder.group(home.module)
