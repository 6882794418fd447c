"""Models as they are quantized: layers that follow one another, and their matrices with their names in the folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from tpshard.kernels.quantized.gptq_solver import Heads
from tpshard.kernels.quantized.quantized import Quantized, concatenate
from tpshard.models import build
from tpshard.models.families.config import ModelConfig
from tpshard.models.folders.hf_config import write_config
from tpshard.models.folders.hf_names import Home, fuse, hf_modules, hf_tensors
from tpshard.models.folders.hf_quantized import quantizable
from tpshard.models.layer_stacks import layer_stacks
from tpshard.models.transformers import attention_interface, patch_attention
from tpshard.models.transformers.architecture import Architecture
from tpshard.models.transformers.tp_plan import dims_of_plan

Read = Callable[[str], Tensor]
"""A function that returns a parameter's dense values by name."""


class NotQuantizable(ValueError):
    """A class of transformers that cannot be quantized; the message names the reason."""


@dataclass(frozen=True)
class Matrix:
    """A matrix of a layer: its place in the folder and in the model, and whether it can be quantized."""

    module: str
    """Its module in the folder; `*` stands for the number of an expert."""
    fits: bool
    """Whether GPTQ files can hold it."""
    parameter: str
    """The parameter that holds it, alone or in a stack."""
    count: int = 1
    """The number of experts that have such a matrix, else 1."""
    router: bool = False
    """Whether it chooses experts; such a matrix stays dense."""


@dataclass(frozen=True)
class ExpertMatrices:
    """The stacked matrices [expert, outputs, inputs] of a layer's experts; writing to them changes the layer."""

    names: tuple[str, str, str]
    """The names of gate, up and down."""
    weights: tuple[Tensor, Tensor, Tensor]


class LayeredModel(ABC):
    """A model on `meta` whose layers are filled, computed and quantized one after the other."""

    model: nn.Module
    """The module, which a task's inputs go into."""
    stacks: tuple[str, ...]
    """The paths of the lists of layers, in any order."""
    separates_documents: bool = True
    """Whether layers get the documents of their rows as an argument."""
    knows_heads: bool = False
    """Whether `heads` names the heads of all linears that have some."""
    parameters: list[str]
    matrices: Mapping[str, Matrix]
    """The matrices of the layers, by their modules' names."""

    @abstractmethod
    def experts(self, layer: nn.Module, prefix: str) -> ExpertMatrices | None:
        """Gives the layer copies of its experts' matrices and returns the copies; None for a layer without experts."""

    @abstractmethod
    def heads(self, name: str) -> Heads | None:
        """The heads from which a matrix gets its inputs; None for other inputs."""

    @abstractmethod
    def stored(self, quantized: Mapping[str, Quantized]) -> Iterator[tuple[str, Quantized]]:
        """Yields (module's name in the folder, linear) for a layer. Names in `quantized` end in `[3]` for expert 3."""

    @abstractmethod
    def dense(self, names: Iterable[str], read: Read) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the folder that hold these parameters."""

    @abstractmethod
    def config_json(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json of a folder in fp16, without its quantization. others: see `write_config`."""

    def weight_of(self, linear: nn.Module) -> Tensor:
        """The weight [outputs, inputs] of a linear of the model."""
        return linear.weight.detach()  # type: ignore[union-attr, operator]

    def set_weight(self, linear: nn.Module, weight: Tensor) -> None:
        linear.weight = nn.Parameter(weight, requires_grad=False)


class FamilyLayers(LayeredModel):
    """A model of one of tpshard's families."""

    stacks = ("layers",)
    knows_heads = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config = config = replace(config, capacity=None)  # a server drops no tokens
        self.model = build(config, device="meta", dtype=dtype)
        self.parameters, self._homes, fits = list(config.shapes), hf_modules(config), quantizable(config)
        self.matrices = {
            name: Matrix(
                self._homes[name].module.format("*"),
                f"{name}.weight" in fits,
                f"{name}.weight",
                (config.experts or 0) if leaf.kind == "experts" else 1,
                "choice" in leaf.dims,
            )
            for name, leaf in config.leaves.items()
            if name.startswith("layers.") and leaf.kind in ("linear", "experts")
        }

    def experts(self, layer: nn.Module, prefix: str) -> ExpertMatrices | None:
        leaves = ("gate", "up", "down")
        names = tuple(f"{prefix}mlp.experts.{leaf}" for leaf in leaves)
        if names[0] not in self.matrices:
            return None
        stacks = [layer.get_submodule(f"mlp.experts.{leaf}") for leaf in leaves]
        weights = tuple(self.weight_of(stack).clone() for stack in stacks)
        for stack, weight in zip(stacks, weights):
            self.set_weight(stack, weight)
        return ExpertMatrices(names, weights)  # type: ignore[arg-type]

    def heads(self, name: str) -> Heads | None:
        dims: Mapping[str, tuple[str, ...]] = getattr(self.model.get_submodule(name), "dims", {})
        c = self.config
        return Heads(c.heads, c.kv_heads, c.head_dim) if dims.get("weight", ())[1:] == ("heads",) else None

    def stored(self, quantized: Mapping[str, Quantized]) -> Iterator[tuple[str, Quantized]]:
        """Yields a layer's linears by their modules in the folder; linears that share a matrix are side by side."""
        shared: dict[str, list[tuple[str, Home]]] = {}
        for name in quantized:
            stack, _, expert = name.partition("[")
            home = self._homes[stack]
            shared.setdefault(home.module.format(expert.rstrip("]")), []).append((name, home))
        for module, parts in shared.items():
            parts.sort(key=lambda part: part[1].part[2] if part[1].part else 0)
            start, rows = 0, []
            for name, home in parts:
                rows.append((torch.arange(start, start + quantized[name].outputs), home))
                start += quantized[name].outputs
            joined = quantized[parts[0][0]] if len(parts) == 1 else concatenate([quantized[name] for name, _ in parts])
            yield module, joined.to("cpu").take_columns(fuse(rows))

    def dense(self, names: Iterable[str], read: Read) -> Iterator[tuple[str, Tensor]]:
        for tensor, parts in hf_tensors(self.config, names).items():
            yield tensor, fuse([(read(parameter), home) for parameter, home in parts])

    def config_json(self, others: Mapping[str, Any]) -> dict[str, Any]:
        return write_config(replace(self.config, dtype="fp16"), "fp16", others)


_EXPERTS = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
"""The matrices of an expert, and the stacked parameters of transformers' modules that hold them."""


_OTHER_EXPERTS = "are not SwiGLU experts without biases, which alone can be quantized"


class TransformersLayers(LayeredModel):
    """A model that transformers' own class computes. Its folder has the names of the module's parameters.

    Raises NotQuantizable for a class without one list of layers, one that mixes tokens outside attention, and experts
    other than SwiGLU without biases.
    """

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        from transformers.pytorch_utils import Conv1D

        self.architecture, self.model = architecture, architecture.build(dtype)
        name = type(self.model).__name__
        if not architecture.attends and not patch_attention.took_place(self.model):
            raise NotQuantizable(f"{name} mixes tokens by itself, so that `tpshard serve` could not serve its folder")
        self.stacks = (only_list(self.model),)
        self.separates_documents = architecture.attends and not patch_attention.took_place(self.model)
        self._transposed: type[nn.Module] = Conv1D
        self._dims = {path: named.dims for path, named in dims_of_plan(self.model).items()}
        self.knows_heads = architecture.heads is not None and any(d[1:] == ("heads",) for d in self._dims.values())
        self.parameters = [path for path, _ in self.model.named_parameters()]
        self.matrices = matrices = dict[str, Matrix]()
        for path, module in self.model.named_modules():
            if not path.startswith(f"{self.stacks[0]}."):
                continue
            if isinstance(module, (nn.Linear, Conv1D)):
                outputs, inputs = self.weight_of(module).shape
                router = self._chooses(path, outputs)
                matrices[path] = Matrix(path, fits_gptq(outputs, inputs), f"{path}.weight", router=router)
            elif set(module._parameters) >= set(_EXPERTS.values()):
                if not attention_interface.are_swiglu(module):
                    raise NotQuantizable(f"`{path}` {_OTHER_EXPERTS}")
                count, outputs, inputs = module.gate_up_proj.shape
                fits = fits_gptq(outputs // 2, inputs)
                for leaf, held in _EXPERTS.items():
                    matrices[f"{path}.{leaf}"] = Matrix(f"{path}.*.{leaf}", fits, f"{path}.{held}", count)
            elif "expert" in path and any(one is not None and one.dim() == 3 for one in module._parameters.values()):
                raise NotQuantizable(f"`{path}` {_OTHER_EXPERTS}")

    def _chooses(self, path: str, outputs: int) -> bool:
        """Whether a linear is a router: it has one output for each of the experts in the same module."""
        beside = self.model.get_submodule(path.rpartition(".")[0]).children()
        stacks = [module._parameters.get("down_proj") for module in beside]
        return any(stack is not None and len(stack) == outputs for stack in stacks)

    def experts(self, layer: nn.Module, prefix: str) -> ExpertMatrices | None:
        for path, module in layer.named_modules():
            if set(module._parameters) >= set(_EXPERTS.values()):
                inward, down = (module.get_parameter(leaf).detach().clone() for leaf in ("gate_up_proj", "down_proj"))
                module.gate_up_proj = nn.Parameter(inward, requires_grad=False)
                module.down_proj = nn.Parameter(down, requires_grad=False)
                gate, up = inward.chunk(2, 1)
                gate_name, up_name, down_name = (f"{prefix}{path}.{leaf}_proj" for leaf in ("gate", "up", "down"))
                return ExpertMatrices((gate_name, up_name, down_name), (gate, up, down))
        return None

    def heads(self, name: str) -> Heads | None:
        heads, inputs = self.architecture.heads, self.weight_of(self.model.get_submodule(name)).shape[1]
        if heads is None or self._dims.get(f"{name}.weight", ())[1:] != ("heads",) or heads[0] * heads[2] != inputs:
            return None
        return Heads(*heads)

    def weight_of(self, linear: nn.Module) -> Tensor:
        weight = super().weight_of(linear)
        return weight.T if isinstance(linear, self._transposed) else weight

    def set_weight(self, linear: nn.Module, weight: Tensor) -> None:
        super().set_weight(linear, weight.T.contiguous() if isinstance(linear, self._transposed) else weight)

    def stored(self, quantized: Mapping[str, Quantized]) -> Iterator[tuple[str, Quantized]]:
        for name, linear in quantized.items():
            matrix, _, expert = name.partition("[")
            yield self.matrices[matrix].module.replace("*", expert.rstrip("]")), linear.to("cpu")

    def dense(self, names: Iterable[str], read: Read) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, read(name)

    def config_json(self, others: Mapping[str, Any]) -> dict[str, Any]:
        raw = {key: value for key, value in self.architecture.raw.items() if key != "torch_dtype"}
        return {**raw, "dtype": "float16"}


def fits_gptq(outputs: int, inputs: int) -> bool:
    """Whether GPTQ files can hold a matrix."""
    return outputs % 32 == 0 and inputs % 32 == 0


def only_list(model: nn.Module) -> str:
    """The path of the model's only list of layers. NotQuantizable where there is none, or several."""
    paths = [stack.path for stack in layer_stacks(model)]
    if len(paths) != 1:
        several = f"several lists of layers: {', '.join(paths)}" if paths else "no list of layers"
        raise NotQuantizable(f"{type(model).__name__} has {several}; one list is quantized layer by layer")
    return paths[0]
