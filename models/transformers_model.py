"""A model that a class of transformers computes, described by a folder's config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpshard.models.families.config import Contradiction
from tpshard.models.folders import hf_config, hf_headers, new_tokens
from tpshard.models.folders.folder_identity import folder_identity
from tpshard.models.folders.hf_json import refuse_code
from tpshard.models.folders.new_tokens import WidenedWeights
from tpshard.models.model_spec import ModelSource, ModelSpec, Positions, Sizes, StoredWeights
from tpshard.models.transformers.class_names import check_class

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from tpshard.models.dims import Naming
    from tpshard.models.folders.hf_quantized import QuantizedModules
    from tpshard.models.layered.layered_model import TransformersLayers
    from tpshard.models.transformers.architecture import Architecture
    from tpshard.models.transformers.class_values import ClassValues

LEARNED = (
    "bart", "bert", "biogpt", "camembert", "electra", "ernie", "gpt2", "gpt_bigcode", "gpt_neo", "opt", "plbart",
    "rembert", "roberta", "roberta-prelayernorm", "xglm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""Model types with a table of positions, which ends. Others go on beyond the positions they name."""


@dataclass(frozen=True)
class TransformersModel(ModelSpec):
    """A model of a class of transformers, with its values from the source's folder or drawn by the class's own rule."""

    raw: Mapping[str, Any]
    """The contents of config.json without `quantization_config`."""
    source: ModelSource = field(default=ModelSource("transformers", ""), compare=False)
    _values: dict[int, ClassValues] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of_folder(
        folder: str | Path,
        overrides: Mapping[str, Any] | None = None,
        *,
        key: str = "transformers",
        weights: bool = True,
    ) -> TransformersModel:
        """A folder's model, its tensors compared with the class's parameters. ValueError for what is unsupported.

        Without `weights` only config.json, headers and the class's name are looked at, without torch. key: the key of
        the recipe; `hf` where no family of tpshard computes the folder.
        """
        raw = hf_config.read_raw(folder)
        vocab = dict(overrides or {}).pop("vocab", None)
        if {*(overrides or {})} - {"vocab"}:
            reason = hf_config.class_reason(raw) if key == "hf" else "a `transformers` model has no overrides"
            key = next(key for key in overrides or {} if key != "vocab")
            raise ValueError(f"{reason}; change `{key}` in its config.json instead")
        source = ModelSource(key, str(folder), Path(folder))
        dense = {name: value for name, value in raw.items() if name != "quantization_config"}
        model = TransformersModel(dense, source)
        if vocab is not None and vocab != model.vocab:
            if vocab < (model.vocab or 0):
                raise Contradiction(f"`vocab: {vocab}` is less than the {model.vocab} tokens of {folder}", "vocab")
            text = dense.get("text_config")
            wider: dict[str, Any] = {"vocab_size": vocab}
            if isinstance(text, dict) and "vocab_size" in text:
                wider = {"text_config": {**text, **wider}}
            model = TransformersModel({**dense, **wider}, source)
        stored = hf_headers.has_weights(folder)  # refuses pickles
        if not weights:
            if stored:
                hf_headers.homes(folder)
            check_class(raw)
            return model
        from tpshard.models.transformers.architecture import Architecture
        from tpshard.models.transformers.class_weights import FolderWeights

        described = Architecture.of(folder)
        if described.raw == model.raw:
            model.__dict__["architecture"] = described
        if stored:
            FolderWeights(folder, described, described.build(), values=False)
        return model

    @staticmethod
    def of_json(values: Mapping[str, Any]) -> TransformersModel:
        """The model that `to_json` wrote."""
        raw = dict(values)
        refuse_code(raw, Path("config.json"))
        return TransformersModel(raw)

    @cached_property
    def architecture(self) -> Architecture:
        """The class with its configuration. Imports torch."""
        from tpshard.models.transformers.architecture import Architecture

        return Architecture(self.raw)

    @property
    def _numbers(self) -> Mapping[str, Any]:
        """What config.json says of the text model."""
        text = self.raw.get("text_config")
        return {**self.raw, **(text if isinstance(text, dict) else {})}

    @property
    def vocab(self) -> int | None:  # type: ignore[override]
        count = self._numbers.get("vocab_size")
        return count if isinstance(count, int) else None

    @property
    def positions(self) -> Positions | None:  # type: ignore[override]
        numbers = self._numbers
        sizes = (numbers.get(name) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
        most = next((size for size in sizes if isinstance(size, int) and size > 0), None)
        learned = numbers.get("position_embedding_type") == "absolute" or numbers.get("model_type") in LEARNED
        return None if most is None else Positions(most, learned)

    @property
    def recurrent(self) -> bool:  # type: ignore[override]
        return self.architecture.recurrent

    @property
    def dtype(self) -> str:
        return self.architecture.kind

    @cached_property
    def sizes(self) -> Sizes:
        a = self.architecture
        text = a.config.get_text_config()
        experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
        return Sizes(
            vocab=a.vocab, max_seq=a.max_seq, layers=getattr(text, "num_hidden_layers", None), heads=a.heads,
            experts=experts or 0, top_k=getattr(text, "num_experts_per_tok", None) or 0, chunk=a.chunk,
            original_seq=a.original_seq,
        )  # fmt: skip

    @property
    def identity(self) -> Mapping[str, str]:
        files = {} if self.source.folder is None else folder_identity(self.source.folder)
        return {"transformers": version("transformers"), **files}

    def module(self, dtype: torch.dtype) -> nn.Module:
        return self.architecture.build(dtype)

    @cached_property
    def weights(self) -> StoredWeights | None:
        folder = self.source.folder
        if folder is None or not hf_headers.has_weights(folder):
            return None
        from tpshard.models.transformers.architecture import Architecture
        from tpshard.models.transformers.class_weights import FolderWeights

        described = Architecture.of(folder)
        if described.vocab == self.vocab:
            return FolderWeights(folder, self.architecture, self.architecture.build())
        stored = FolderWeights(folder, described, described.build())
        vocab = described.vocab, self.vocab
        return WidenedWeights(stored, stored.shapes, self.shapes, vocab)

    def initial_block(
        self, name: str, starts: Sequence[int], sizes: Sequence[int], seed: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        import torch
        from tpshard.models.transformers.class_values import ClassValues

        if self.weights is not None:
            return self.weights.block(name, starts, sizes, dtype or torch.float32)
        if seed not in self._values:
            self._values.clear()
            self._values[seed] = ClassValues(self.architecture, seed)
        return self._values[seed].block(name, starts, sizes, dtype or torch.float32)

    def dims(self, module: nn.Module) -> dict[str, Naming]:
        """Those of transformers' tensor-parallel plan for the class."""
        from tpshard.models.transformers.tp_plan import dims_of_plan

        return dims_of_plan(module)

    def own_dtypes(self, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
        return self.architecture.own_dtypes(dtype)

    def read_from(self, source: ModelSource) -> TransformersModel:
        return replace(self, source=source)

    def notes(self, module: nn.Module) -> list[str]:
        folder = self.source.folder
        stored = None if folder is None else TransformersModel(hf_config.read_raw(folder)).vocab
        return new_tokens.note(stored, self.vocab) + self.architecture.notes(module)

    @property
    def instead(self) -> str:  # type: ignore[override]
        if self.source.key != "hf":
            return ""
        return hf_config.class_reason(self.raw) or f"tpshard has no family for {self.raw.get('model_type')}"

    def to_json(self) -> dict[str, Any]:
        return {"transformers": dict(self.raw)}

    def quantized_modules(self, folder: Path) -> QuantizedModules:
        from tpshard.models.folders.hf_quantized import QuantizedModules
        from tpshard.models.transformers.class_weights import FolderWeights

        stored = self.weights
        files = stored.stored if isinstance(stored, WidenedWeights) else stored
        if not isinstance(files, FolderWeights) or files.folder != folder:
            files = FolderWeights(folder, self.architecture, self.architecture.build())
        return QuantizedModules(folder, files.module_of, files.stack_of)

    def layered(self, dtype: torch.dtype) -> TransformersLayers:
        from tpshard.models.layered.layered_model import TransformersLayers

        return TransformersLayers(self.architecture, dtype)

    def write(
        self, read: Callable[[str], Tensor], folder: Path, *, dtype: torch.dtype, tokenizer: Path | None = None,
        base: Path | None = None, overwrite: bool = False,
    ) -> None:  # fmt: skip
        from tpshard.models.transformers.class_weights import write_folder

        write_folder(self.architecture, read, folder, dtype=dtype, tokenizer=tokenizer, base=base,
                     overwrite=overwrite)  # fmt: skip
