"""A model whose quantized weights stay packed: the frozen base of adapters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from tpshard.files.folder_json import FolderError
from tpshard.kernels.quantized.gptq_config import GPTQConfig, read_config
from tpshard.models.adapters.based_model import BasedModel, of_base
from tpshard.models.model_spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from tpshard.kernels.quantized.dequantize import Coding
    from tpshard.models.adapters.lora import Adaptable
    from tpshard.models.dims import Naming
    from tpshard.models.folders.hf_quantized import QuantizedModules
    from tpshard.models.layer_stacks import LayerStack


def is_quantized(spec: ModelSpec) -> bool:
    """Whether a model's folder is quantized by GPTQ."""
    folder = spec.source.folder
    return folder is not None and (folder / "config.json").is_file() and read_config(folder) is not None


@dataclass(frozen=True)
class PackedModel(BasedModel):
    """A model of a GPTQ folder whose quantized linears are parameters as `kernels.quantized.dequantize` describes them:
    `codes`, `scales`, `zeros`, and `group`, in the place of `weight`."""

    base: ModelSpec
    planned: GPTQConfig | None = None
    """How the weights will be quantized that do not exist yet; None: the base's folder has them."""
    coded: Mapping[str, Coding] | None = field(default=None, compare=False)
    """The quantized linears that a model of fewer layers keeps; None: all."""

    @staticmethod
    def of_folder(base: ModelSpec) -> ModelSpec:
        """The model of a quantized folder with its weights packed; `base` itself for any other."""
        return PackedModel(base) if is_quantized(base) else base

    @cached_property
    def codings(self) -> Mapping[str, Coding]:
        """How each quantized linear is packed, by its path. ValueError where the folder contradicts itself."""
        if self.coded is not None:
            return self.coded
        found = {path: self._coding(one) for path, one in self._linears.items()}
        return {path: coding for path, coding in found.items() if coding is not None}

    @cached_property
    def _linears(self) -> Mapping[str, Adaptable]:
        return {one.path: one for one in self.base.adaptable() if not one.holder}

    @cached_property
    def _stored(self) -> QuantizedModules:
        folder = self.base.source.folder
        assert folder is not None
        return self.base.quantized_modules(folder)

    def _coding(self, one: Adaptable) -> Coding | None:
        """How a linear is packed; None for one that stays dense, as do experts whose matrices have several orders."""
        import torch
        from tpshard.kernels.quantized.dequantize import Coding
        from tpshard.kernels.quantized.quantized import group_count, group_index
        from tpshard.models.folders.hf_quantized import quantizable

        name = f"{one.path}.weight"
        if self.planned is not None:
            assert self.base.outline is not None
            settings = self.planned if name in quantizable(self.base.outline) else None
        else:
            settings = self._stored.settings_of(name)
        if settings is None:
            return None
        groups = group_count(one.inputs, settings.group_size)
        ordered = settings.desc_act or (groups > 1 and one.inputs % settings.group_size > 0)
        if self.planned is None and not ordered:
            known = self._stored.group(name)
            each = [known] if known is not None else self._stored.groups_of_first_expert(name)
            ordered = any(not torch.equal(own, group_index(one.inputs, settings.group_size)) for own in each)
        return Coding(settings.bits, groups, ordered)

    # ---- the model -------------------------------------------------------------------------------------------------
    def module(self, dtype: torch.dtype) -> nn.Module:
        from tpshard.models.adapters.packed_layers import pack_layer

        model = self.base.module(dtype)
        for path, coding in self.codings.items():
            pack_layer(model, path, coding)
        return model

    @cached_property
    def _leaves(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """(path of the linear, shape) of each packed tensor, by its name."""
        leaves = {}
        for path, coding in self.codings.items():
            one = self._linears[path]
            stack = (one.experts,) if one.experts else ()
            for leaf, shape in coding.shapes((*stack, one.outputs, one.inputs)).items():
                leaves[f"{path}.{leaf}"] = path, shape
        return leaves

    @cached_property
    def packed(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self._leaves)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        dense = {f"{path}.weight" for path in self.codings}
        kept = {name: shape for name, shape in self.base.shapes.items() if name not in dense}
        return {**kept, **{name: shape for name, (_, shape) in self._leaves.items()}}

    def dims(self, module: nn.Module) -> dict[str, Naming]:
        """The base's, those of dense weights among them; a packed tensor has its weight's, but for groups."""
        from tpshard.kernels.quantized.dequantize import CODES, GROUP
        from tpshard.models.dims import Naming

        named = dict(self._dense_dims)
        for name, (path, _) in self._leaves.items():
            if (weight := named.get(f"{path}.weight")) is not None:
                *stack, outputs, inputs = weight.dims
                leaf = name.rpartition(".")[2]
                own = {CODES: (*stack, outputs, inputs), GROUP: (*stack, inputs)}.get(leaf, (*stack, outputs, ""))
                named[name] = Naming(own, weight.by)
        return named

    @cached_property
    def _dense_dims(self) -> Mapping[str, Naming]:
        return self.base.dims(self.base.build())

    def own_dtypes(self, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
        from tpshard.kernels.quantized.dequantize import DTYPES

        own = {name: DTYPES[name.rpartition(".")[2]] for name in self._leaves}
        return {**self.base.own_dtypes(dtype), **own}

    def initial_block(
        self, name: str, starts: Sequence[int], sizes: Sequence[int], seed: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        if name not in self._leaves:
            return self.base.initial_block(name, starts, sizes, seed, dtype)
        path, leaf = name.rpartition(".")[::2]
        if self.planned is not None:
            raise FolderError(
                f"the preset {self.base.source.name} has no quantized weights: `adapters.packed` is for plans",
                "model.hf: the folder that `tpshard quantize` wrote; or leave out `adapters.packed`",
            )
        cut = [slice(start, start + size) for start, size in zip(starts, sizes)]
        if not self._linears[path].experts:
            return self._read(path, -1)[leaf][tuple(cut)].clone()
        import torch

        return torch.stack([self._read(path, e)[leaf][tuple(cut[1:])] for e in range(cut[0].start, cut[0].stop)])

    @cached_property
    def _read(self) -> Any:
        """(path, expert or -1) -> the tensors of a linear by their leaf; the tensors of one are read in a row."""

        def read(path: str, expert: int) -> dict[str, Tensor]:
            name, one = f"{path}.weight", self._linears[path]
            weight = self._stored.linear(name) if expert < 0 else self._stored.expert(name, expert, 0, one.outputs)
            assert weight is not None
            return self.codings[path].tensors(weight)

        return lru_cache(maxsize=1)(read)

    def keep(self, layers: Sequence[int]) -> PackedModel | None:
        fewer, stacks = self.base.keep(layers), self.base.stacks
        if fewer is None or not stacks:
            return None
        places = {f"{stacks[0].path}.{layer}": f"{stacks[0].path}.{new}" for new, layer in enumerate(layers)}
        coded = {}
        for path, coding in self.codings.items():
            layer = re.match(rf"{re.escape(stacks[0].path)}\.\d+(?=\.)", path)
            if layer is None or layer[0] in places:
                coded[path if layer is None else places[layer[0]] + path[layer.end() :]] = coding
        return replace(self, base=fewer, coded=coded)

    @property
    def stacks(self) -> tuple[LayerStack, ...] | None:  # type: ignore[override]
        """The base's; layers of one kind are quantized alike too."""
        from tpshard.models.layer_stacks import refined

        stacks = self.base.stacks
        return None if stacks is None else tuple(
            refined(stack, self.codings.items(), "weights are quantized otherwise") for stack in stacks
        )  # fmt: skip

    @property
    def identity(self) -> Mapping[str, str]:
        return {**self.base.identity, **({} if self.planned is None else {"quantized": repr(self.planned)})}

    def notes(self, module: nn.Module) -> list[str]:
        bits = ", ".join(map(str, sorted({coding.bits for coding in self.codings.values()})))
        note = (
            f"{len(self.codings)} quantized linears stay packed, {bits} bits: they are dequantized where they are used"
        )
        return [*self.base.notes(module), *([note] if bits else ())]

    # ---- the base's ------------------------------------------------------------------------------------------------
    count = of_base("count")
    to_json = of_base("to_json")
    plain = of_base("plain")
    read_from = of_base("read_from")
