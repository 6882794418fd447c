"""Reading a quantized folder as a dense one: `P.weight` is computed when it is read, from `P.qweight`, `P.scales`, ...,
or from numbers of 8 or 4 bits and their scales."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from tpshard.kernels.fp8.scaled_config import ScaledConfig
from tpshard.kernels.quantized.gptq_config import GPTQConfig, read_config
from tpshard.kernels.quantized.gptq_format import SUFFIXES, GPTQFolder
from tpshard.kernels.quantized.quantized import Quantized
from tpshard.models.families.config import ModelConfig
from tpshard.models.folders.foreign_formats import scaled_folder
from tpshard.models.folders.hf_files import Tensors
from tpshard.models.folders.hf_headers import homes
from tpshard.models.folders.hf_names import Home, hf_modules


class DequantizedTensors(Tensors):
    """The tensors of a GPTQ folder, with every quantized linear dequantized to a dense fp16 weight [outputs, inputs].

    ValueError where the tensors contradict quantization_config.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)  # first: it refuses files outside the folder
        self._quantized = GPTQFolder(self.folder, self._home)
        if not self._quantized.modules:
            raise ValueError(f"{self.folder} has a quantization_config, but no `qweight`")
        self.coded_weights = {f"{module}.weight": module for module in self._quantized.modules}
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

    def zero_bias(self, name: str) -> bool:
        """Whether a tensor is the bias of a quantized linear, and zero: AutoGPTQ gave one to each linear."""
        module, _, leaf = name.rpartition(".")
        return leaf == "bias" and f"{module}.weight" in self.coded_weights and not bool(self.block(name).any())

    def block(self, name: str, starts: Sequence[int] = (), sizes: Sequence[int] = ()) -> Tensor:
        module = self.coded_weights.get(name)
        if module is None:
            return super().block(name, starts, sizes)
        cut = tuple(slice(start, start + size) for start, size in zip(starts, sizes))
        return self._dense(module)[cut].clone()


class ScaledTensors(Tensors):
    """The tensors of a folder whose weights are numbers of few bits with scales. Each is multiplied to fp32 when read.

    ValueError for numbers of 8 bits without scales, and for scales of another shape than `config` says.
    """

    def __init__(self, folder: str | os.PathLike[str], config: ScaledConfig) -> None:
        super().__init__(folder)
        self._config = config
        packed = [name for name in self._home if config.packed and name.endswith(_PACKED)]
        self._packed = {name.removesuffix(_PACKED): name for name in packed}
        self._home |= {name: self._home[words] for name, words in self._packed.items()}
        stored = {name: super(ScaledTensors, self).dtype(self._packed.get(name, name)) for name in self._home}
        self._scale_of = {
            name: self._scale(name) for name, dtype in stored.items() if dtype in _IN_8_BITS or name in self._packed
        }
        shapes = (f"{name}_shape" for name in self._packed)
        self._others = {*self._scale_of.values(), *filter(self._of_activations, self._home), *shapes,
                        *self._packed.values()}  # fmt: skip
        for name, dtype in stored.items():
            if name not in self._scale_of and (scale := self._beside(name)) is not None:
                raise ValueError(f"{self.folder} holds `{scale}` beside `{name}`, which is {dtype}")

    def _beside(self, name: str) -> str | None:
        return next((f"{name}{end}" for end in _SCALES if f"{name}{end}" in self._home), None)

    def _of_activations(self, name: str) -> bool:
        """Whether a tensor is a scale of activations, which are not rounded here."""
        module, _, leaf = name.rpartition(".")
        return (leaf in _OF_INPUTS and f"{module}.weight" in self._scale_of) or (
            leaf in _OF_CACHE and math.prod(self.shape(name)) == 1
        )

    def _scale(self, name: str) -> str:
        scale = self._beside(name)
        if scale is None:
            raise ValueError(f"{self.folder} holds `{name}` in 8 bits without `{name}{_SCALES[0]}` or `{_SCALES[1]}`")
        if (dtype := super().dtype(scale)) not in _SCALE_DTYPES:
            raise ValueError(f"{self.folder}: `{scale}` is of dtype {dtype}, which is not supported")
        self._sizes(self.shape(name), super().shape(scale), name)
        return scale

    def _sizes(self, shape: tuple[int, ...], scales: tuple[int, ...], name: str) -> tuple[int, ...]:
        """How many elements share a scale in each dim of a weight."""
        counts = (*scales, *(1 for _ in range(len(shape) - len(scales))))
        blocks = (*(1 for _ in shape[:-2]), *(self._config.block or (0, 0)))[-len(shape) :]
        if self._config.block is None:
            blocks = tuple(1 if count == size else size for count, size in zip(counts, shape))
        if len(counts) != len(shape) or any(-(-n // b) != count for n, b, count in zip(shape, blocks, counts)):
            form = "as config.json says" if self._config.block is None else f"for blocks of {list(self._config.block)}"
            raise ValueError(f"{self.folder}: the scales {list(scales)} of `{name}` {list(shape)} are not {form}")
        return blocks

    def __contains__(self, name: object) -> bool:
        return name not in self._others and super().__contains__(name)

    def names(self) -> list[str]:
        return [name for name in super().names() if name not in self._others]

    def dtype(self, name: str) -> str:
        return "F32" if name in self._scale_of else super().dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return super().shape(name)
        *rows, words = super().shape(self._packed[name])
        if f"{name}_shape" not in self._home:
            raise ValueError(f"{self.folder} holds `{self._packed[name]}` without `{name}_shape`")
        shape = tuple(super().block(f"{name}_shape").tolist())
        if shape[:-1] != tuple(rows) or -(-shape[-1] * self._config.packed // 32) != words:
            raise ValueError(f"{self.folder}: `{self._packed[name]}` {[*rows, words]} has no numbers for {list(shape)}")
        return shape

    def _unpacked(self, name: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The numbers [starts, starts + sizes) of a packed weight, int32."""
        shape, bits = self.shape(name), self._config.packed
        starts, sizes = ([*part, *whole[len(part) :]] for part, whole in ((starts, [0] * len(shape)), (sizes, shape)))
        each, (start, size) = 32 // bits, (starts[-1], sizes[-1])
        first, end = start // each, -(-(start + size) // each)
        words = super().block(self._packed[name], [*starts[:-1], first], [*sizes[:-1], end - first])
        numbers = (words.unsqueeze(-1) >> torch.arange(0, 32, bits, dtype=torch.int32)) & ((1 << bits) - 1)
        return numbers.flatten(-2).narrow(-1, start - first * each, size) - (1 << (bits - 1))

    def block(self, name: str, starts: Sequence[int] = (), sizes: Sequence[int] = ()) -> Tensor:
        value = self._unpacked(name, starts, sizes) if name in self._packed else super().block(name, starts, sizes)
        if name not in self._scale_of:
            return value
        shape, scales = self.shape(name), super().block(self._scale_of[name])
        blocks = self._sizes(shape, tuple(scales.shape), name)
        scales = scales.float().view(*scales.shape, *(1 for _ in range(len(shape) - scales.dim())))
        value = value.float()
        for dim, (start, size, block) in enumerate(zip((*starts, *(0 for _ in shape)), value.shape, blocks)):
            scales = scales.index_select(dim, torch.arange(start, start + size) // block)
        return value.mul_(scales)


_PACKED = "_packed"
_IN_8_BITS = ("F8_E4M3", "F8_E5M2", "I8")
_SCALES = ("_scale_inv", "_scale")
"""What a weight's name ends with in that of its scales."""
_SCALE_DTYPES = ("F32", "F16", "BF16", "F8_E8M0")
_OF_INPUTS = ("input_scale", "input_scale_ub", "output_scale", "activation_scale")
_OF_CACHE = ("k_scale", "v_scale", "q_scale")


def tensors_of(folder: Path) -> Tensors:
    """The tensors of a folder, as dense ones: of GPTQ codes, of numbers of 8 bits with scales, or as they are."""
    if (config := scaled_folder(folder)) is not None:
        return ScaledTensors(folder, config)
    return DequantizedTensors(folder) if read_config(folder) is not None else Tensors(folder)


def quantizable(config: ModelConfig) -> frozenset[str]:
    """The matrices of the layers that GPTQ files can hold, experts stacked: inputs and outputs are multiples of 32.

    Parameters that share a fused matrix in the folder are quantized together or not at all.
    """
    homes, shapes, together = hf_modules(config), config.shapes, dict[str, list[str]]()
    for name, shape in shapes.items():
        module, _, leaf = name.rpartition(".")
        if (
            name.startswith("layers.")
            and leaf == "weight"
            and len(shape) > 1
            and "choice" not in config.parameters[name]
        ):
            together.setdefault(homes[module].module, []).append(name)
    return frozenset(
        name
        for names in together.values()
        for name in names
        if shapes[name][-1] % 32 == 0 and sum(shapes[other][-2] for other in names) % 32 == 0
    )


Stacked = Sequence[Sequence[str]]
"""The quantized linears of a parameter of stacked experts: of each expert, those whose outputs follow one another."""


class QuantizedModules:
    """The quantized linears of a GPTQ folder by the names of parameters, which are mapped to the folder's.

    module_of: the linear of a parameter; stack_of: the linears of a parameter of stacked experts. Both return None for
    other parameters.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        module_of: Callable[[str], str | None],
        stack_of: Callable[[str], Stacked | None],
    ) -> None:
        self._folder = GPTQFolder(Path(folder), homes(folder))
        self._module_of, self._stack_of = module_of, stack_of
        self.settings = self._folder.config

    def settings_of(self, name: str) -> GPTQConfig | None:
        """The quantization settings of a parameter; None if it is dense, or if they differ between its experts."""
        stack = self._stack_of(name)
        if stack is None:
            module = self._module_of(name)
            return None if module is None else self._folder.config.of(module)
        first, *others = (self._folder.config.of(module) for expert in stack for module in expert)
        return first if all(other == first for other in others) else None

    def linear(self, name: str) -> Quantized | None:
        """The whole quantized weight; None for a parameter that is dense or stacked."""
        module = self._module_of(name)
        return None if module is None else self._folder.linear(module)

    def expert(self, name: str, index: int, start: int, size: int) -> Quantized:
        """Outputs [start, start + size) of one matrix of a stacked parameter; they are outputs of one linear."""
        stack = self._stack_of(name)
        assert stack is not None, f"{name} is not stacked"
        for module in stack[index]:
            outputs = self._folder.outputs(module)
            if start + size <= outputs:
                return self._folder.linear(module).take_columns(torch.arange(start, start + size))
            start -= outputs
        raise AssertionError(f"outputs of several linears of {name}")

    def group(self, name: str) -> Tensor | None:
        """The group of each input of a weight, int32 [inputs]; None for a parameter that is dense or stacked."""
        module = self._module_of(name)
        return None if module is None else self._folder.group(module)

    def groups_of_first_expert(self, name: str) -> list[Tensor]:
        """The groups of the linears of a stacked parameter's first expert; none for other parameters."""
        stack = self._stack_of(name)
        return [] if stack is None else [self._folder.group(module) for module in stack[0]]


class QuantizedParameters(QuantizedModules):
    """The quantized linears of a GPTQ folder, by the names of a tpshard family (`layers.0.mlp.up.weight`)."""

    def __init__(self, folder: str | os.PathLike[str], config: ModelConfig) -> None:
        super().__init__(folder, self._module, self._stack)
        self._homes, self._modules = hf_modules(config), set(self._folder.modules)

    def _home(self, name: str) -> Home | None:
        module, _, leaf = name.rpartition(".")
        return self._homes.get(module) if leaf == "weight" else None

    def _module(self, name: str) -> str | None:
        home = self._home(name)
        return home.module if home is not None and home.module in self._modules else None

    def _stack(self, name: str) -> Stacked | None:
        home = self._home(name)
        modules = [] if home is None else [home.module.format(i) for i in range(home.stack)]
        return [[module] for module in modules] if modules and self._modules.issuperset(modules) else None

    def linear(self, name: str) -> Quantized | None:
        """The quantized form of a weight, of a fused matrix only its own outputs; None for one dense or stacked."""
        linear, home = super().linear(name), self._home(name)
        if linear is None or home is None or home.part is None:
            return linear
        return linear.take_columns(home.take(torch.arange(linear.outputs)))
