"""A stored model that a command reads, and the mistake that it cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tpshard.diagnostics.diagnostic import Exit, Mistakes

if TYPE_CHECKING:
    import torch
    from tpshard.models.adapters.adapted_model import AdaptedModel
    from tpshard.models.model_spec import ModelSpec
    from tpshard.train.checkpoints.store_path import Location
    from tpshard.train.run.training_engine import ReadBlock


@dataclass(frozen=True)
class SourceModel:
    """A model with its values, read one parameter at a time."""

    name: str
    """The path of the checkpoint or folder, for messages."""
    spec: ModelSpec
    block: ReadBlock
    dtype: torch.dtype
    """The dtype of the stored values."""
    tokenizer: Path | None = None
    base: Path | None = None
    """The Hugging Face folder whose settings and other small files go along with the model."""
    quantized: bool = False
    """Whether it is a GPTQ folder, whose blocks are dequantized when read."""
    adapted: AdaptedModel | None = None
    """The model with its adapters apart, where `spec` and `block` are those of its base with them merged in."""
    own_block: ReadBlock | None = None
    """The reader of the parameters of `adapted`."""

    @property
    def folders(self) -> list[Path]:
        """The folders that may hold settings of the model: its own, and the one whose files go along."""
        return [Path(self.name), *([self.base] if self.base is not None else [])]

    def read(self, name: str) -> torch.Tensor:
        """A whole parameter. Raises `Mistakes` (exit 7) where it cannot be read."""
        shape = self.spec.shapes[name]
        return self.read_block(name, (0,) * len(shape), shape)

    def read_block(self, name: str, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Elements [starts, starts + sizes) of a parameter. Errors as of `read`."""
        return self._checked(name, starts, sizes, self.block)

    def read_own(self, name: str) -> torch.Tensor:
        """A whole parameter of `adapted`. Errors as of `read`."""
        assert self.adapted is not None and self.own_block is not None
        shape = self.adapted.shapes[name]
        return self._checked(name, (0,) * len(shape), shape, self.own_block)

    def _checked(self, name: str, starts: Sequence[int], sizes: Sequence[int], block: ReadBlock) -> torch.Tensor:
        from tpshard.files.folder_json import FolderError
        from tpshard.models.folders.hf_files import BEFORE_NAN, holds_nan
        from tpshard.train.checkpoints.restore import Damaged

        try:
            value = block(name, starts, sizes)
            if holds_nan(value):
                raise FolderError(f"`{name}` holds values that are not numbers (NaN)", BEFORE_NAN)
            return value
        except (Damaged, ValueError, OSError) as error:
            raise unreadable_source(self.name, error) from error


def unreadable_source(folder: Location | str, error: Exception) -> Mistakes:
    """The mistake (exit 7) that a source cannot be read."""
    fix = getattr(error, "fix", "correct it, or name another")
    return Mistakes.one(f"{folder} cannot be read", exit=Exit.CHECKPOINT, why=str(error), fix=fix)
