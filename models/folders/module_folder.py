"""Folders of quantized modules of users: config.json names the class, and tensors are named as its parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpshard.files.folder_json import FolderError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MODULE, _ARGS = "tpshard_module", "args"


def config_of_module(path: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that name the class `package.module:Class`, and what it is called with."""
    return {_MODULE: path, _ARGS: dict(args)}


def module_of(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The class that a config.json names, and what it is called with; None where it names none. ValueError for wrong
    values."""
    if _MODULE not in raw:
        return None
    path, args = raw[_MODULE], raw.get(_ARGS, {})
    if not isinstance(path, str) or not isinstance(args, dict):
        raise ValueError(f"config.json: `{_MODULE}` is not package.module:Class with a mapping `{_ARGS}`")
    return path, args


def refuse_module(raw: Mapping[str, Any], folder: str | os.PathLike[str]) -> None:
    """Raises FolderError for the folder of a user's module, which no recipe has named."""
    if (named := module_of(raw)) is not None:
        raise FolderError(
            f"{folder} holds the weights of {named[0]}, a user's module, which is code: it is imported for a recipe, "
            "never for a folder",
            f"tpshard evaluate RECIPE serve.checkpoint={folder}, with a RECIPE that has model.module: {named[0]}; "
            "`serve` takes it so too, if its task is lm",
        )


class ModuleWeights:
    """The weights of a quantized folder of a user's module, dequantized where they are read.

    shapes: those of the module's parameters, by name. ValueError for tensors that are missing, superfluous or of
    another shape.
    """

    quantized = True

    def __init__(self, folder: Path, shapes: Mapping[str, Sequence[int]]) -> None:
        from tpshard.models.folders.hf_quantized import DequantizedTensors

        self.tensors = DequantizedTensors(folder)
        missing = [f"`{name}` is missing" for name in shapes if name not in self.tensors]
        foreign = [f"`{name}` is no parameter of the module" for name in self.tensors.names() if name not in shapes]
        foreign = [] if missing else foreign
        wrong = [
            f"`{name}` is {list(self.tensors.shape(name))}, the module makes it {list(shape)}"
            for name, shape in shapes.items()
            if name in self.tensors and self.tensors.shape(name) != tuple(shape)
        ]
        self.tensors.refuse([*missing, *foreign, *wrong])

    def block(self, name: str, starts: Sequence[int], sizes: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Elements [starts, starts + sizes) of parameter `name`; dtype defaults to that of the file."""
        value = self.tensors.block(name, starts, sizes)
        return value if dtype is None else value.to(dtype)
