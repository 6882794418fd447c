"""The room for adapters in a recipe's server, and the folders that are loaded into it."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes
from tpshard.models.adapters.lora import A, B
from tpshard.models.adapters.peft_config import CONFIG
from tpshard.models.adapters.peft_folder import PeftFolder, is_peft
from tpshard.models.adapters.slotted_model import Slots
from tpshard.models.folders.hf_files import holds_nan
from tpshard.models.model_spec import ModelSpec
from tpshard.models.open_model import manifest_of
from tpshard.recipes.keys.schema import Recipe

MORE, RANK = 4, 16
"""Slots beside those of `serve.adapters`, and the least rank of all, where clients may load adapters."""
MERGE = "`tpshard convert FOLDER OUT --merge` writes the model with it, which can be served"


def slots_of(recipe: Recipe, spec: ModelSpec) -> Slots | None:
    """The room for adapters of this model that a recipe asks for; None: none. Mistakes, exit 7, for a folder that
    cannot be served."""
    section = recipe.serve
    if not section.adapters and section.adapter_root is None and section.max_loras is None:
        return None
    opened, mistakes = [], []
    for name, folder in section.adapters.items():
        try:
            opened.append(open_adapters(Path(folder), spec))
            if section.max_lora_rank is not None:
                _check_rank(opened[-1], section.max_lora_rank)
        except (ValueError, OSError) as error:
            mistakes.append(Diagnostic(
                f"the adapter `{name}` cannot be served", exit=Exit.CHECKPOINT,
                where=recipe.where(f"serve.adapters.{name}"), why=str(error),
                fix=getattr(error, "fix", "name another folder"),
            ))  # fmt: skip
    if mistakes:
        raise Mistakes(mistakes)
    own = {path: one for each in opened for path, one in each.spec.adapters.items()}
    any_of = section.adapter_root is not None or not opened
    rank = max((one.rank for each in opened for one in each.spec.adapters.values()), default=RANK)
    layers = [
        one.path
        for one in spec.adaptable()
        if one.path in own or (any_of and not (one.experts or one.head or one.table or one.router))
    ]
    return Slots(
        section.max_loras or len(opened) + (MORE if section.adapter_root is not None else 0),
        section.max_lora_rank or (max(rank, RANK) if any_of else rank), tuple(layers),
    )  # fmt: skip


class UnservedError(ValueError):
    """An adapter that a server cannot hold; `fix` says what can be done."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


def open_adapters(folder: Path, spec: ModelSpec, slots: Slots | None = None) -> PeftFolder:
    """The adapters in a folder for a served model. ValueError for those of another model, of a kind that is not served,
    or for which the slots have no room."""
    if not is_peft(folder):
        fix = "name another folder"
        if manifest_of(folder) is not None:
            fix = f"`tpshard convert {folder} OUT` writes the adapters of a run, or a checkpoint, as such a folder"
        missing = f"it has no {CONFIG}" if folder.is_dir() else "there is no such folder"
        raise UnservedError(f"{folder} holds no adapters: {missing}", fix)
    opened = PeftFolder.of(folder, spec)
    adapters = opened.spec.adapters
    assert opened.spec.lora is not None
    for wrong, what in (
        (opened.spec.lora.dora, "`use_dora`"), (opened.spec.saved, "`modules_to_save`"),
        (any(one.layer.experts or one.layer.router for one in adapters.values()), "adapters of experts or routers"),
    ):  # fmt: skip
        if wrong:
            raise UnservedError(f"{folder / CONFIG}: {what} cannot be served beside other adapters", MERGE)
    if slots is not None:
        _check_rank(opened, slots.rank)
        if other := next((path for path in adapters if path not in slots.layers), None):
            message = f"{folder / CONFIG}: `{other}` has an adapter, and this server has room for none there"
            raise UnservedError(message, "name the folder in `serve.adapters`, or set `serve.adapter_root`")
    return opened


def _check_rank(opened: PeftFolder, most: int) -> None:
    for path, one in opened.spec.adapters.items():
        if one.rank > most:
            message = f"{opened.folder / CONFIG}: the adapter of `{path}` has rank {one.rank}, above {most}"
            raise UnservedError(message, f"serve.max_lora_rank: {one.rank}")


def slot_values(opened: PeftFolder) -> dict[str, Tensor]:
    """The factors of a folder's adapters by name, fp32: A [rank, inputs], and B [outputs, rank] with its scaling.
    ValueError for NaN."""
    values: dict[str, Tensor] = {}
    for path, one in opened.spec.adapters.items():
        values[f"{path}.{A}"] = opened.read(one.name(A)).float()
        values[f"{path}.{B}"] = opened.read(f"{path}.{B}").float() * one.scaling
    if wrong := next((name for name, value in values.items() if holds_nan(value)), None):
        raise ValueError(f"{opened.folder}: `{wrong}` holds values that are not numbers (NaN)")
    return values
