"""A model that a family of tpshard computes: a preset, or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpshard.models.families import presets
from tpshard.models.families.config import ModelConfig
from tpshard.models.families.config_keys import DEFAULTS, training_notes
from tpshard.models.folders import hf_config, hf_headers, new_tokens
from tpshard.models.folders.folder_identity import folder_identity
from tpshard.models.folders.new_tokens import WidenedWeights
from tpshard.models.model_spec import ModelSource, ModelSpec, Positions, Sizes, StoredWeights, Use

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from tpshard.models.adapters.lora import Adaptable
    from tpshard.models.folders.hf_quantized import QuantizedParameters
    from tpshard.models.initialization import InitPlan
    from tpshard.models.layer_stacks import LayerStack
    from tpshard.models.layered.layered_model import FamilyLayers

LAYERS = "layers"
"""The name of every family's list of layers."""


@dataclass(frozen=True)
class FamilyModel(ModelSpec):
    """A model of a family, with its values from the source's folder or drawn."""

    config: ModelConfig
    fewest_rows = 1
    names_dims = True
    source: ModelSource = field(default=ModelSource("preset", ""), compare=False)

    @staticmethod
    def of_preset(name: str, overrides: Mapping[str, Any] | None = None) -> FamilyModel:
        """A preset with overrides. ValueError names what is unknown or contradictory."""
        return FamilyModel(presets.preset(name, overrides), ModelSource("preset", name))

    @staticmethod
    def of_folder(
        folder: str | Path, overrides: Mapping[str, Any] | None = None, *, weights: bool = True
    ) -> FamilyModel:
        """A folder's model with overrides, its tensors compared with config.json. ValueError for what is unsupported.

        Without `weights` only config.json and the headers are read, without torch.
        """
        source = ModelSource("hf", str(folder), Path(folder))
        if not hf_headers.has_weights(folder):  # refuses pickles
            return FamilyModel(presets.override(hf_config.folder_config(folder), overrides or {}), source)
        if weights:
            from tpshard.models.folders.hf_folder import HFFolder

            config = HFFolder(folder).config
        else:
            hf_headers.homes(folder)
            config = hf_config.folder_config(folder)
        return FamilyModel(presets.override_folder(config, overrides or {}, str(folder)), source)

    @staticmethod
    def of_json(values: Mapping[str, Any]) -> FamilyModel:
        """The model that `to_json` wrote."""
        numbers = dict(values)
        family = numbers.pop("family")
        sizes = {key: numbers[key] for key in numbers if key != "rope_scaling"}
        return FamilyModel(presets.override(ModelConfig(family, **sizes), {"rope_scaling": numbers["rope_scaling"]}))

    @property
    def outline(self) -> ModelConfig:  # type: ignore[override]
        return self.config

    @property
    def vocab(self) -> int:  # type: ignore[override]
        return self.config.vocab

    @property
    def positions(self) -> Positions:  # type: ignore[override]
        return Positions(self.config.max_seq, self.config.family_entry.positions == "learned", "model.max_seq")

    @property
    def count(self) -> int:  # type: ignore[override]
        return self.config.count

    @property
    def activations(self) -> Mapping[str, tuple[str, ...]]:  # type: ignore[override]
        return self.config.activations

    @property
    def parameter_dims(self) -> Mapping[str, tuple[str, ...]]:
        return self.config.parameters

    def divides(self, dim: str, ways: int) -> bool:
        return self.config.divides(dim, ways)

    @property
    def stacks(self) -> tuple[LayerStack, ...]:  # type: ignore[override]
        from tpshard.models.layer_stacks import LayerStack

        c = self.config
        full = [layer in c.full_layers for layer in range(c.layers)]
        differs = "this model has experts" if c.experts else ""
        if len(set(full)) > 1:
            differs = f"`window` is {c.window_of(0)} in layer 0 and {c.window_of(full.index(not full[0]))} in another"
        return (LayerStack(LAYERS, tuple(map(int, full)), differs),)

    @property
    def dtype(self) -> str:
        return self.config.dtype

    @property
    def sizes(self) -> Sizes:
        c = self.config
        return Sizes(
            vocab=c.vocab, max_seq=c.max_seq, layers=c.layers, train_seq=c.seq_len,
            heads=(c.heads, c.kv_heads, c.head_dim), experts=c.experts or 0, top_k=c.top_k or 0, capacity=c.capacity,
        )  # fmt: skip

    @property
    def identity(self) -> Mapping[str, str]:
        return {} if self.source.folder is None else folder_identity(self.source.folder)

    def module(self, dtype: torch.dtype) -> nn.Module:
        from tpshard.models.assemble import build

        return build(self.config, dtype=dtype)

    @cached_property
    def weights(self) -> StoredWeights | None:
        if self.source.folder is None:
            return None
        from tpshard.models.folders.hf_folder import HFFolder

        stored = HFFolder(self.source.folder)
        if stored.config.vocab == self.vocab:
            return stored
        vocab = stored.config.vocab, self.vocab
        return WidenedWeights(stored, stored.shapes, self.shapes, vocab)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.config.shapes

    def initial_block(
        self, name: str, starts: Sequence[int], sizes: Sequence[int], seed: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        import torch
        from tpshard.models.initialization import initial_block

        if self.weights is not None:
            return self.weights.block(name, starts, sizes, dtype or torch.float32)
        return initial_block(self._plan, name, starts, sizes, seed, dtype or torch.float32)

    @cached_property
    def _plan(self) -> InitPlan:
        from tpshard.models.initialization import init_plan

        return init_plan(self.build())

    def adaptable(self) -> list[Adaptable]:
        from tpshard.models.adapters.lora import Adaptable
        from tpshard.models.folders.hf_names import hf_modules, parameter_of

        homes, c = hf_modules(self.config), self.config
        layers = []
        for path, leaf in c.leaves.items():
            if leaf.kind == "table":
                rows, width = (c.size(dim, leaf) for dim in leaf.dims)
                shares = c.tie_embeddings and path == "tok_embed"
                layers.append(Adaptable(path, width, rows, turned=True, theirs=homes[path].module, table=True,
                                        shares=shares))  # fmt: skip
            elif leaf.kind in ("linear", "experts"):
                *stack, outputs, inputs = (c.size(dim, leaf) for dim in leaf.dims)
                head, home = path == "output", homes[path]
                parameter, part = parameter_of(home, outputs)
                layers.append(Adaptable(path, outputs, inputs, sum(stack), head=head, theirs=home.module,
                                        router=leaf.dims[0] == "choice", parameter=parameter, part=part))  # fmt: skip
        if c.tie_embeddings:
            layers.append(Adaptable("output", c.vocab, c.width, head=True, theirs="lm_head", shares=True))
        return layers

    def folder_names(self) -> dict[str, str]:
        from tpshard.models.folders.hf_names import hf_modules

        return {path: home.module for path, home in hf_modules(self.config).items()}

    @property
    def tied(self) -> tuple[str, str] | None:
        return ("lm_head", "tok_embed.weight") if self.config.tie_embeddings else None

    def notes(self, module: nn.Module) -> list[str]:
        if self.source.folder is None:
            return []
        raw, family = hf_config.read_raw(self.source.folder), self.config.family_entry
        more = new_tokens.note(hf_config.folder_config(self.source.folder).vocab, self.vocab)
        return more + training_notes({**DEFAULTS.get(family.hf.model_type, {}), **raw}, family)

    def keep(self, layers: Sequence[int]) -> FamilyModel:
        full = tuple(place for place, layer in enumerate(layers) if layer in self.config.full_layers)
        return replace(self, config=replace(self.config, layers=len(layers), full_layers=full))

    def served(self, mlp: int | None = None) -> FamilyModel:
        config = replace(self.config, capacity=None) if self.config.capacity is not None else self.config
        config = config if mlp in (None, config.mlp) else replace(config, mlp=mlp)
        return self if config is self.config else replace(self, config=config)

    def read_from(self, source: ModelSource) -> FamilyModel:
        return replace(self, source=source)

    def refusal(self, use: Use) -> str:
        folder = self.source.folder
        if use == "train" and folder is not None and not hf_headers.has_weights(folder):
            return f"{folder} has no weights"
        return ""

    def to_json(self) -> dict[str, Any]:
        return {"config": asdict(self.config)}

    def quantized_modules(self, folder: Path) -> QuantizedParameters:
        from tpshard.models.folders.hf_quantized import QuantizedParameters

        return QuantizedParameters(folder, self.config)

    def layered(self, dtype: torch.dtype) -> FamilyLayers:
        from tpshard.models.layered.layered_model import FamilyLayers

        return FamilyLayers(self.config, dtype)

    def write(
        self, read: Callable[[str], Tensor], folder: Path, *, dtype: torch.dtype, tokenizer: Path | None = None,
        base: Path | None = None, overwrite: bool = False,
    ) -> None:  # fmt: skip
        from tpshard.models.folders.hf_folder import write_hf

        write_hf(self.config, read, folder, dtype=dtype, tokenizer=tokenizer, base=base, overwrite=overwrite)
