"""Sources with adapters: a run's checkpoint, which leaves its frozen base out, and a folder in PEFT's format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tpshard.cli.shared.source_model import SourceModel, unreadable_source
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.files.folder_json import FolderError
from tpshard.models.adapters.adapted_model import AdaptedModel
from tpshard.models.adapters.merging import merged_blocks
from tpshard.models.adapters.peft_config import read_config
from tpshard.models.adapters.peft_folder import PeftFolder
from tpshard.models.folders.folder_tokenizer import tokenizer_files
from tpshard.models.folders.new_tokens import widened
from tpshard.models.open_model import open_alike, open_model

if TYPE_CHECKING:
    from torch import Tensor
    from tpshard.train.checkpoints.restore import SavedCheckpoint
    from tpshard.train.run.training_engine import ReadBlock


def whole_blocks(spec: AdaptedModel, checkpoint: SavedCheckpoint) -> ReadBlock:
    """The reader of all parameters of a run with adapters: its checkpoint's, and the base's from where the run began.
    ValueError and OSError where that is gone or has changed."""
    from tpshard.train.run.initial_values import values_of

    place, seed = checkpoint.meta.get("init_from"), int(checkpoint.meta.get("seed", 0))
    if place is not None and not Path(place).exists():
        raise FolderError(f"its adapters began from {place}, which is gone", "restore that: it holds their base")
    begun = values_of(Path(place), spec) if place is not None else {}
    folder, stored = spec.base.source.folder, spec.base.weights
    if folder is not None and (other := open_alike(folder, spec.base)).shapes != spec.base.shapes:
        widened(checkpoint.block, other.shapes, spec.base.shapes, (other.vocab, spec.base.vocab))  # raises

    def block(name: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        if name in checkpoint.tensors:
            return checkpoint.block(name, starts, sizes)
        if name in begun:
            return begun[name](name, starts, sizes)
        return stored.block(name, starts, sizes) if stored else spec.base.initial_block(name, starts, sizes, seed)

    return block


def with_adapters(model: SourceModel, spec: AdaptedModel, block: ReadBlock) -> SourceModel:
    """The source as its base with the adapters merged in. block: the reader of the base's and the adapters' values."""
    stored = spec.base.weights
    if stored is not None:
        name = next(iter(spec.base.shapes))
        shape = spec.base.shapes[name]
        model = replace(model, dtype=block(name, (0,) * len(shape), (1,) * len(shape)).dtype)
    try:
        merged = merged_blocks(spec, block)
    except ValueError as error:  # adapters alone can be written nevertheless
        merged = _refused(model.name, error)
    return replace(model, spec=spec.base, block=merged, adapted=spec, own_block=block)


def _refused(name: str, error: ValueError) -> ReadBlock:
    """Raises `Mistakes` (exit 4) where the first block is read."""

    def block(*place: object) -> Tensor:
        raise Mistakes.one(
            f"the adapters of {name} cannot be merged", exit=Exit.FIT, why=str(error),
            fix="`tpshard convert` writes them in PEFT's format; modules_to_save trains such a weight as a whole",
        ) from error  # fmt: skip

    return block


def peft_source(folder: Path) -> SourceModel:
    """A folder with adapters, with the base that it names merged in. Raises `Mistakes` (exit 7) for what cannot be
    read, or a base that is not on this machine."""
    try:
        named = str(read_config(folder).get("base_model_name_or_path") or "")
        place = next((one for one in (Path(named), folder / named) if named and (one / "config.json").is_file()), None)
        if place is None:
            fix = f'tpshard chat BASE "serve.adapters={{own: {folder}}}" --adapter own, where BASE is its model'
            base_is = f"its base, `base_model_name_or_path: {named}`, is no folder of this machine"
            raise FolderError(base_is if named else "its `base_model_name_or_path` names no base", fix)
        base = open_model(place)
        adapters = PeftFolder.of(folder, base)
        stored = base.weights
        if stored is None:
            raise ValueError(f"{place} holds no weights")

        def block(name: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
            read = adapters.block if name in adapters.places else stored.block
            return read(name, starts, sizes)

        import torch

        tokenizer = folder if tokenizer_files(folder) else place if tokenizer_files(place) else None
        model = SourceModel(str(folder), base, block, torch.float32, tokenizer, place)
        return with_adapters(model, adapters.spec, block)
    except (ValueError, OSError) as error:
        raise unreadable_source(folder, error) from error
