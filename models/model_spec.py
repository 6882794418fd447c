"""A model as one value, whatever names it: a preset, a folder, a class of transformers, or a user's module.

`models.open_model` gives it; `family_model`, `transformers_model` and `module_model` implement it. What it says as
properties needs no torch, unless a docstring says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from tpshard.models.adapters.lora import Adaptable
    from tpshard.models.dims import Naming
    from tpshard.models.families.config import ModelConfig
    from tpshard.models.folders.hf_quantized import QuantizedModules
    from tpshard.models.layer_stacks import LayerStack
    from tpshard.models.layered.layered_model import LayeredModel

Use = Literal["train", "serve", "write", "quantize"]


@dataclass(frozen=True)
class ModelSource:
    """What names a model."""

    key: str
    """The key of a recipe's `model` section; for a checkpoint or a folder by itself the one that would name it."""
    name: str
    """Its value: the name of a preset, a folder, or `package.module:Class`."""
    folder: Path | None = None
    """The Hugging Face folder that it names, if it names one."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that do not depend on a mesh; None where nothing says them."""

    vocab: int | None = None
    max_seq: int | None = None
    """The longest sequence that the positions support."""
    layers: int | None = None
    """The number of repeated layers."""
    train_seq: int | None = None
    """Tokens of a sequence of training where the recipe names none."""
    heads: tuple[int, int, int] | None = None
    """(query heads, KV heads, size of a head)."""
    experts: int = 0
    top_k: int = 0
    capacity: float | None = None
    chunk: int | None = None
    """The number of tokens within which some layers attend (Llama 4)."""
    original_seq: int | None = None
    """The length of sequences above which the rotary embedding uses other frequencies."""


@dataclass(frozen=True)
class Positions:
    """How long a sequence can be."""

    most: int
    end: bool
    """Whether later positions have no values: a table of learned ones ends, rotary ones go on."""
    key: str = ""
    """The key of a recipe that changes them, if one does."""


class StoredWeights(Protocol):
    """The weights of a folder, read by blocks; those of a quantized folder are dequantized."""

    quantized: bool

    def block(self, name: str, starts: Sequence[int], sizes: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Elements [starts, starts + sizes) of parameter `name`; dtype defaults to that of the file."""


class ModelSpec(ABC):
    """A model that can be built, whose initial values can be read by blocks, and what is known of it before that."""

    source: ModelSource
    outline: ModelConfig | None = None
    """The dims, shapes and names of all parameters and activations, where they are known before the module is built."""
    stacks: tuple[LayerStack, ...] | None = None
    """The layers that repeat; None where only the built module can tell (`layer_stacks`)."""
    vocab: int | None = None
    """The tokens of its vocabulary, where a preset or config.json says them."""
    positions: Positions | None = None
    """The positions for which it was made, where a preset or config.json says them."""
    count: int | None = None
    """The number of its parameters, where that is known before the module is built."""
    activations: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """The dims of the activations that have a name of their own."""
    instead: str = ""
    """Why a class of transformers computes a folder that was named for a family of tpshard; "" elsewhere."""
    recurrent = False
    """Whether some layers carry a state from token to token."""
    fewest_rows = 2
    """The least rows of a server's step: many classes compute a dim of one element otherwise (`paging.shrink`)."""
    names_dims = False
    """Whether all dims have names, which a recipe cannot change; a first dim of the batch's size is the batch then."""
    reads_code = False
    """Whether building it runs code of the user's, which may depend on anything."""
    added: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    """The shapes of parameters that the outline does not have: those of adapters."""
    frozen: frozenset[str] = frozenset()
    """The parameters that a recipe freezes."""
    packed: frozenset[str] = frozenset()
    """The parameters that hold quantized weights."""
    left_out: frozenset[str] = frozenset()
    """The parameters that checkpoints leave out, since a run does not change them and begins from them again."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The dtype of its computation or its stored values: fp32, bf16 or fp16."""

    @property
    @abstractmethod
    def sizes(self) -> Sizes:
        """Its sizes. For classes of transformers and modules this imports torch."""

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, str]:
        """What decides its programs besides the recipe: versions of packages and hashes of files, by name."""

    @abstractmethod
    def module(self, dtype: torch.dtype) -> nn.Module:
        """The module on `meta`, its parameters in `dtype`. ValueError where it cannot be built."""

    @abstractmethod
    def initial_block(
        self, name: str, starts: Sequence[int], sizes: Sequence[int], seed: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A block of a parameter's initial value: stored in the folder, or drawn from `seed`."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The model as JSON values for a checkpoint, which replaces the weights of a folder."""

    @cached_property
    def weights(self) -> StoredWeights | None:
        """The weights from which training starts; None if all values are drawn. ValueError where a folder's are
        missing or do not fit. Imports torch."""
        return None

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every parameter, by name."""
        import torch

        return {name: tuple(parameter.shape) for name, parameter in self.module(torch.float32).named_parameters()}

    def build(
        self, *, device: torch.device | str = "meta", dtype: torch.dtype | None = None, seed: int = 0
    ) -> nn.Module:
        """The module; on a real device with initial values. dtype defaults to fp32."""
        import torch
        from tpshard.models.initialization import fill

        model = self.module(torch.float32 if dtype is None else dtype)
        if torch.device(device).type == "meta":
            return model
        return fill(model, lambda name, starts, sizes, dtype: self.initial_block(name, starts, sizes, seed, dtype),
                    device)  # fmt: skip

    def dims(self, module: nn.Module) -> dict[str, Naming]:
        """The names of the dims of the parameters that have some."""
        from tpshard.models.dims import Naming, param_dims

        return {name: Naming(dims, "") for name, dims in param_dims(module).items()}

    @property
    def parameter_dims(self) -> Mapping[str, tuple[str, ...]]:
        """The names of the dims of the parameters that have some. Imports torch where only the module says them."""
        return {name: named.dims for name, named in self.dims(self.build()).items()}

    def divides(self, dim: str, ways: int) -> bool:
        """Whether a dim can be sharded over `ways` devices in equal parts, as far as that is known."""
        return True

    def own_dtypes(self, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
        """The dtypes of parameters that are used in one of their own where the model is used in `dtype`: those that a
        transformers class keeps in fp32, and those of a user's module that has several."""
        return {}

    def adaptable(self) -> Sequence[Adaptable]:
        """The linear layers and embeddings that can have adapters. For classes of transformers and modules this builds
        the module."""
        from torch import nn
        from tpshard.models.adapters.lora import HOLDER, STACKED, Adaptable

        module = self.build()
        head: Any = getattr(module, "get_output_embeddings", lambda: None)()
        owners = Counter(id(one) for layer in module.modules() for one in layer._parameters.values())
        layers = []
        for path, layer in module.named_modules():
            kind = type(layer).__name__
            linear = isinstance(layer, nn.Linear) and kind != "NonDynamicallyQuantizableLinear"
            weight, turned = getattr(layer, "weight", None), kind == "Conv1D"
            shares = owners[id(weight)] > 1
            if path and isinstance(layer, nn.Embedding):
                layers.append(Adaptable(path, layer.embedding_dim, layer.num_embeddings, turned=True, table=True,
                                        shares=shares))  # fmt: skip
            elif path and weight is not None and (linear or kind in ("Conv1D", "Linear")) and weight.dim() == 2:
                outputs, inputs = weight.shape[::-1] if turned else weight.shape
                layers.append(Adaptable(path, outputs, inputs, turned=turned, head=layer is head, shares=shares))
            for leaf in () if getattr(layer, "is_transposed", False) else STACKED:
                stack = layer._parameters.get(leaf)
                if stack is not None and stack.dim() == 3:
                    experts, outputs, inputs = stack.shape
                    layers.append(Adaptable(f"{path}.{leaf}{HOLDER}", outputs, inputs, experts,
                                            parameter=f"{path}.{leaf}", holder=True))  # fmt: skip
        return layers

    def folder_names(self) -> Mapping[str, str]:
        """The path of each module with parameters in a Hugging Face folder, by its own, where they differ."""
        return {}

    def called(self) -> Mapping[str, Sequence[str]]:
        """The names by which a recipe may mean each parameter: its own, and that in a Hugging Face folder, where a
        stacked expert's number is `{}`."""
        theirs = self.folder_names()
        parts = {name: name.rpartition(".") for name in self.shapes}
        return {name: tuple(dict.fromkeys((name, f"{theirs.get(path, path)}.{leaf}"))) if path else (name,)
                for name, (path, _, leaf) in parts.items()}  # fmt: skip

    @property
    def tied(self) -> tuple[str, str] | None:
        """The head's path in a Hugging Face folder, and the parameter of the embeddings that is its weight too.
        For classes of transformers and modules this builds the module."""
        module: Any = self.build()
        head, table = (getattr(module, f"get_{side}_embeddings", lambda: None)() for side in ("output", "input"))
        if head is None or table is None or head.weight is not table.weight:
            return None
        paths = {layer: path for path, layer in module.named_modules()}
        return paths[head], f"{paths[table]}.weight"

    def notes(self, module: nn.Module) -> list[str]:
        """Sentences on differences from its authors' training."""
        return []

    def keep(self, layers: Sequence[int]) -> ModelSpec | None:
        """The same model with these of its layers alone; None where only the built module can leave some out."""
        return None

    @property
    def plain(self) -> ModelSpec:
        """The model without adapters and frozen parameters: what it is once adapters are merged into it."""
        return self

    def served(self, mlp: int | None = None) -> ModelSpec:
        """The model as a server computes it; mlp: another hidden size of its MLP.

        Experts have no capacity: which tokens exceed it depends on later tokens, which a server does not have.
        """
        return self

    def read_from(self, source: ModelSource) -> ModelSpec:
        """The same model with the weights of a folder."""
        raise ValueError(f"{type(self).__name__} has no folder")

    def refusal(self, use: Use) -> str:
        """Why it cannot be used so; "" if it can."""
        return ""

    def quantized_modules(self, folder: Path) -> QuantizedModules:
        """The quantized linears of a GPTQ folder with this model."""
        raise ValueError(self.refusal("quantize"))

    def layered(self, dtype: torch.dtype) -> LayeredModel:
        """The model in layers, as GPTQ quantizes it. ValueError where it has no list of layers."""
        raise ValueError(self.refusal("quantize"))

    def write(
        self, read: Callable[[str], Tensor], folder: Path, *, dtype: torch.dtype, tokenizer: Path | None = None,
        base: Path | None = None, overwrite: bool = False,
    ) -> None:  # fmt: skip
        """Writes a Hugging Face folder. read: returns a parameter by name. base: the folder that the model came from,
        whose other small files go along."""
        raise ValueError(self.refusal("write"))
