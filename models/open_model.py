"""The one door to a model: of a recipe's section, of a folder, or of a checkpoint's manifest."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tpshard.files.folder_json import read_regular
from tpshard.models.adapters.adapted_model import AdaptedModel
from tpshard.models.family_model import FamilyModel
from tpshard.models.folders.hf_config import DTYPE_NAMES, computes, read_raw
from tpshard.models.folders.module_folder import module_of
from tpshard.models.model_spec import ModelSpec
from tpshard.models.module_model import ModuleModel
from tpshard.models.transformers_model import TransformersModel

if TYPE_CHECKING:
    import torch
    from torch import nn


MANIFEST = "manifest.json"


class ModelSection(Protocol):
    """The section `model` of a recipe, of whose keys exactly one names a model."""

    @property
    def named_by(self) -> str | None: ...

    @property
    def args(self) -> Mapping[str, Any]: ...

    def overrides(self) -> Mapping[str, Any]: ...


def open_model(
    of: ModelSection | str | Path, *, weights: bool = True, instead: Path | None = None, module: str | None = None
) -> ModelSpec:
    """The model that a recipe's section names, or of a Hugging Face folder.

    ValueError names a value that is unknown, unsupported or contradictory, or an override that a folder's weights
    refuse; OSError a file that cannot be read. Without `weights` a folder's tensors are compared by their names alone,
    and torch is not imported. instead: a folder that is opened in place of the one that the section names.
    module: the user's module that the recipe of the command names; a folder of another one is refused, since modules
    are code.
    """
    if isinstance(of, (str, Path)):
        if module is not None and (named := module_of(read_raw(of))) is not None and named[0] == module:
            return ModuleModel(*named, folder=Path(of))
        return _of_folder(str(of), {}, weights)
    if of.named_by is None:
        raise ValueError(f"a model is named by exactly one of {', '.join(DOORS)}")
    if of.args and of.named_by != "module":
        raise ValueError("`args` are for a `module`; presets and folders take overrides")
    return DOORS[of.named_by](of, str(instead or getattr(of, of.named_by)), weights)


def open_alike(folder: str | Path, spec: ModelSpec) -> ModelSpec:
    """A Hugging Face folder, computed as another model is: by its class, also where a family would compute it. Errors
    as of `open_model`."""
    if spec.source.key == "transformers":
        return TransformersModel.of_folder(str(folder), {}, key="transformers", weights=True)
    return open_model(folder)


def _of_folder(folder: str, overrides: Mapping[str, Any], weights: bool) -> ModelSpec:
    if computes(folder):
        return FamilyModel.of_folder(folder, overrides, weights=weights)
    return TransformersModel.of_folder(folder, overrides, key="hf", weights=weights)


def _of_module(section: ModelSection, path: str, weights: bool) -> ModelSpec:
    if changed := ", ".join(section.overrides()):
        raise ValueError(f"a `module` takes `model.args`; it has no {changed} to override")
    return ModuleModel(path, dict(section.args))


DOORS: dict[str, Callable[[ModelSection, str, bool], ModelSpec]] = {
    "preset": lambda section, name, _: FamilyModel.of_preset(name, section.overrides()),
    "hf": lambda section, folder, weights: _of_folder(folder, section.overrides(), weights),
    "transformers": lambda section, folder, weights: TransformersModel.of_folder(
        folder, section.overrides(), key="transformers", weights=weights
    ),
    "module": _of_module,
}
"""Key of a recipe's `model` section -> what opens the model that it names. A fifth source is a line here."""


def _adapted(values: Mapping[str, Any]) -> ModelSpec:
    return AdaptedModel.of_json(values, from_json({key: one for key, one in values.items() if key != "adapters"}))


MANIFESTS: dict[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    "adapters": _adapted,
    "config": lambda values: FamilyModel.of_json(values["config"]),
    "transformers": lambda values: TransformersModel.of_json(values["transformers"]),
    "module": lambda values: ModuleModel(str(values["module"]), dict(values["args"])),
}
"""Key of a manifest's `model` -> the model that `ModelSpec.to_json` wrote with it."""


def from_json(values: Mapping[str, Any]) -> ModelSpec:
    """The model that `ModelSpec.to_json` wrote. ValueError if `values` are anything else."""
    try:
        return next(read(values) for key, read in MANIFESTS.items() if key in values)
    except StopIteration:
        raise ValueError(f"this is not the description of a model: it has none of {', '.join(MANIFESTS)}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is not the description of a model: {type(error).__name__}: {error}") from error


def manifest_of(place: Path) -> Path | None:
    """The manifest of a checkpoint, or of a run's newest one; None where there is neither."""
    if (place / MANIFEST).is_file():
        return place / MANIFEST
    steps = {int(name[1]): file for file in (place / "checkpoints").glob(f"step-*/{MANIFEST}")
             if (name := re.fullmatch(r"step-(\d{6,})", file.parent.name)) is not None}  # fmt: skip
    return steps[max(steps)] if steps else None


def saved_model(manifest: Path, module: str | None = None) -> tuple[ModelSpec, str]:
    """The model of a checkpoint, with its adapters merged, and the dtype of its values. ValueError and OSError where
    the manifest cannot be read, or names another module than `module`, that of the command's recipe."""
    try:
        read: dict[str, Any] = json.loads(read_regular(manifest))
        spec, tensors = from_json(read["meta"]["model"]), read["tensors"]
        stored = next((tensors[name]["dtype"] for name in spec.shapes if name in tensors), "float32")
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{manifest} does not describe a model: {type(error).__name__}: {error}") from error
    if spec.reads_code and spec.source.name != module:
        raise ValueError(f"{manifest} names the module {spec.source.name}, which the recipe does not name")
    merged = spec.plain
    return merged, DTYPE_NAMES.get(stored, "fp32") if merged.weights is None else merged.dtype


def from_hf(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> nn.Module:
    """The model in a folder: token ids [batch, seq] -> logits [batch, seq, vocab]. dtype defaults to config.json's.

    ValueError names what is unsupported or invalid; OSError what cannot be read.
    """
    from tpshard.models.folders.hf_folder import DTYPES
    from tpshard.models.initialization import fill

    spec = open_model(Path(folder))
    if (weights := spec.weights) is None:
        raise ValueError(f"{folder} holds no weights")
    return fill(spec.build(dtype=DTYPES[spec.dtype] if dtype is None else dtype), weights.block, device)
