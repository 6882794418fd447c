"""The description of a model and the source of its values: a preset, a Hugging Face folder, or a user's module.

A Hugging Face folder is computed by a family of tpshard (`hf`) or by transformers' own class (`transformers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tpshard.models.assemble import ModuleValues, build, build_module, own_dtypes
from tpshard.models.families import presets
from tpshard.models.families.config import ModelConfig
from tpshard.models.folders.hf_config import computes
from tpshard.models.folders.hf_folder import HFFolder
from tpshard.models.folders.hf_headers import has_weights
from tpshard.models.folders.hf_json import refuse_code
from tpshard.models.initialization import InitPlan, fill, init_plan, initial_block
from tpshard.models.transformers.architecture import Architecture
from tpshard.models.transformers.class_values import ClassValues
from tpshard.models.transformers.class_weights import FolderWeights


@dataclass(frozen=True)
class Blueprint:
    """A model that can be built, and whose initial values can be read block by block.

    `config` is None for a user's module and for transformers' classes. `folder` is the Hugging Face folder of the
    values, if any.
    """

    config: ModelConfig | None = None
    folder: str | None = None
    module: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    architecture: Architecture | None = None
    weights: FolderWeights | None = field(default=None, compare=False)
    """The weights of a `transformers` model, where its folder has some."""

    @staticmethod
    def of(
        preset: str | None = None,
        hf: str | None = None,
        module: str | None = None,
        args: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
        transformers: str | None = None,
    ) -> Blueprint:
        """The blueprint of a recipe's `model` section, with exactly one of `preset`, `hf`, `transformers` and `module`.

        ValueError names a value that is unknown, unsupported or contradictory, or an override that a folder's weights
        refuse.
        """
        if [preset, hf, transformers, module].count(None) != 3:
            raise ValueError("a model is named by exactly one of preset, hf, transformers and module")
        if module is not None:
            if overrides:
                raise ValueError(f"`module: {module}` takes args; it has no {', '.join(overrides)} to override")
            return Blueprint(module=module, args=dict(args or {}))
        if args:
            raise ValueError("`args` are for a `module`; presets and folders take overrides")
        if preset is not None:
            return Blueprint(presets.preset(preset, overrides))
        if hf is None or not computes(hf):
            folder = str(hf if transformers is None else transformers)
            if overrides:
                raise ValueError(f"a `transformers` model has no overrides; remove {', '.join(overrides)}")
            read = Architecture.of(folder)
            weights = FolderWeights(folder, read, read.build()) if has_weights(folder) else None
            return Blueprint(architecture=read, weights=weights)
        source = HFFolder(hf)
        return Blueprint(presets.override_folder(source.config, overrides or {}, hf), folder=hf)

    def build(
        self, *, device: torch.device | str = "meta", dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> nn.Module:
        """The module; on a real device with initial values, read from the folder if there is one."""
        if self.architecture is not None:
            model = self.architecture.build(dtype)
        elif self.config is not None:
            model = build(self.config, dtype=dtype)
        else:
            model = build_module(str(self.module), self.args, dtype=dtype)
        if torch.device(device).type == "meta":
            return model
        return fill(
            model, lambda name, starts, sizes, dtype: self.initial_block(name, starts, sizes, seed, dtype), device
        )

    def initial_block(
        self, name: str, starts: Sequence[int], sizes: Sequence[int], seed: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """A block of a parameter's initial value, from the folder if there is one (see `models.init.initial_block`)."""
        if self.weights is not None:
            return self.weights.block(name, starts, sizes, dtype)
        if self.config is None:
            return self._values(seed).block(name, starts, sizes, dtype)
        if self.folder is None:
            return initial_block(self._plan, name, starts, sizes, seed, dtype)
        return self._source.block(name, starts, sizes, dtype)

    def own_dtypes(self, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
        """The dtypes of parameters that are used in one of their own where the model is used in `dtype`: those that a
        transformers class keeps in fp32, and those of a user's module that has several."""
        if self.architecture is not None:
            return self.architecture.own_dtypes(dtype)
        return own_dtypes(self.module, self.args) if self.module is not None else {}

    def to_json(self) -> dict[str, Any]:
        """The blueprint as JSON values for a checkpoint.

        The folder is left out: the checkpoint replaces its weights.
        """
        if self.architecture is not None:
            return {"transformers": dict(self.architecture.raw)}
        if self.config is None:
            return {"module": self.module, "args": dict(self.args)}
        return {"config": asdict(self.config)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Blueprint:
        """The blueprint that `to_json` wrote. ValueError if `values` are anything else."""
        try:
            if "transformers" in values:
                raw = dict(values["transformers"])
                refuse_code(raw, Path("config.json"))
                return Blueprint(architecture=Architecture(raw))
            if "module" in values:
                return Blueprint(module=str(values["module"]), args=dict(values["args"]))
            numbers = dict(values["config"])
            family = numbers.pop("family")
            sizes = {key: numbers[key] for key in numbers if key != "rope_scaling"}
            return Blueprint(presets.override(ModelConfig(family, **sizes), {"rope_scaling": numbers["rope_scaling"]}))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is not the description of a model: {type(error).__name__}: {error}") from error

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every parameter, by name."""
        if self.config is not None:
            return self.config.shapes
        return {name: tuple(parameter.shape) for name, parameter in self.build().named_parameters()}

    def _values(self, seed: int) -> ModuleValues | ClassValues:
        kept: dict[int, ModuleValues | ClassValues] = self.__dict__.setdefault("_kept", {})
        if seed not in kept:
            kept.clear()
            if self.architecture is not None:
                kept[seed] = ClassValues(self.architecture, seed)
            else:
                kept[seed] = ModuleValues(str(self.module), self.args, self.build(), seed)
        return kept[seed]

    @cached_property
    def _plan(self) -> InitPlan:
        return init_plan(self.build())

    @cached_property
    def _source(self) -> HFFolder:
        assert self.folder is not None
        return HFFolder(self.folder)
