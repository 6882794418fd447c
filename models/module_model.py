"""A model of the user's own class."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpshard.models.folders.folder_identity import folder_identity
from tpshard.models.folders.module_folder import ModuleWeights
from tpshard.models.model_spec import ModelSource, ModelSpec, Sizes, Use

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from tpshard.models.assemble import ModuleValues
    from tpshard.models.folders.hf_quantized import QuantizedModules
    from tpshard.models.layered.module_layers import ModuleLayers


@dataclass(frozen=True)
class ModuleModel(ModelSpec):
    """An instance of the class `package.module:Class`, called with `args`."""

    path: str
    args: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    """The folder of `tpshard quantize` that holds its weights, if one does."""
    reads_code = True
    _values: dict[int, ModuleValues] = field(default_factory=dict, compare=False, repr=False)
    _changed: set[str] = field(default_factory=set, compare=False, repr=False)
    """The attributes that forward passes of its modules have changed while they were captured."""

    @property
    def source(self) -> ModelSource:  # type: ignore[override]
        return ModelSource("module", self.path, self.folder)

    @property
    def dtype(self) -> str:
        return "fp32" if self.folder is None else "fp16"

    @property
    def sizes(self) -> Sizes:
        """The size of the vocabulary where a parameter names that dim."""
        module = self.build()
        parameters = dict(module.named_parameters())
        named = ((name, one) for name, one in self.dims(module).items() if name in parameters)
        vocab = (size for name, one in named for dim, size in zip(one.dims, parameters[name].shape) if dim == "vocab")
        return Sizes(vocab=next(vocab, None))

    @property
    def identity(self) -> Mapping[str, str]:
        return code_identity(self.path) | ({} if self.folder is None else folder_identity(self.folder))

    @cached_property
    def weights(self) -> ModuleWeights | None:
        return None if self.folder is None else ModuleWeights(self.folder, self.shapes)

    def module(self, dtype: torch.dtype) -> nn.Module:
        from tpshard.models.assemble import build_module

        return build_module(self.path, self.args, dtype=dtype, changed=self._changed)

    def initial_block(
        self, name: str, starts: Sequence[int], sizes: Sequence[int], seed: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        import torch
        from tpshard.models.assemble import ModuleValues

        if self.weights is not None:
            return self.weights.block(name, starts, sizes, dtype or torch.float32)
        if seed not in self._values:
            self._values.clear()
            self._values[seed] = ModuleValues(self.path, self.args, self.build(), seed)
        return self._values[seed].block(name, starts, sizes, dtype or torch.float32)

    def own_dtypes(self, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
        from tpshard.models.assemble import own_dtypes

        return own_dtypes(self.path, self.args)

    def notes(self, module: nn.Module) -> list[str]:
        """Which of its parameters are buffers, and which attributes its forward pass changes, once it was captured."""
        from tpshard.models.module_state import HeldBuffer

        held = [name for name, parameter in module.named_parameters() if isinstance(parameter, HeldBuffer)]
        kinds = {
            "buffers, which are stored and used like parameters that nothing trains: {}": held,
            f"the forward pass of {self.path.rpartition(':')[2]} changes {{}}: a step's program is captured once, and "
            "every step computes with the value from before": sorted(self._changed),
        }
        return [
            note.format(", ".join(dict.fromkeys(f"`{re.sub('[.][0-9]+(?=[.])', '.*', name)}`" for name in names)))
            for note, names in kinds.items() if names
        ]  # fmt: skip

    def refusal(self, use: Use) -> str:
        if use == "write":
            return f"`{self.path}` is a module of your own, which Hugging Face's folders have no form for"
        return ""

    def quantized_modules(self, folder: Path) -> QuantizedModules:
        from tpshard.models.folders.hf_quantized import QuantizedModules

        stored = ModuleWeights(folder, self.shapes)
        return QuantizedModules(folder, stored.tensors.coded_weights.get, lambda name: None)

    def layered(self, dtype: torch.dtype) -> ModuleLayers:
        from tpshard.models.layered.module_layers import ModuleLayers

        return ModuleLayers(self.path, self.args, self.module(dtype))

    def to_json(self) -> dict[str, Any]:
        return {"module": self.path, "args": dict(self.args)}


def code_identity(path: str) -> dict[str, str]:
    """The hash of the file of `package.module:Class`, by its name; nothing where it cannot be found."""
    try:
        spec = importlib.util.find_spec(path.partition(":")[0])
    except (ImportError, ValueError):
        return {}
    file = Path((spec.origin or "") if spec is not None else "")
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest()[:16]} if file.is_file() else {}
