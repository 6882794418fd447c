"""Reading the safetensors of a Hugging Face folder as data: nothing is executed, unpickled or downloaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tpshard.models.hf_json import file_inside, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Tensors:
    """The tensors of a folder by name, in one safetensors file or several.

    Only headers are read until a block is read.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder")
        self._files: dict[str, Any] = {}
        self._home: dict[str, str] = {}
        claimed = self._index()
        for file in [SINGLE] if claimed is None else sorted(set(claimed.values())):
            for name in self._open(file).keys():  # noqa: SIM118 (not a mapping)
                if claimed is not None and claimed.get(name) != file:
                    raise ValueError(f"{self.folder / file} holds `{name}`, which {INDEX} does not place there")
                self._home[name] = file
        missing = sorted(set(claimed or ()) - set(self._home))
        if missing:
            raise ValueError(f"{self.folder / claimed[missing[0]]} lacks `{missing[0]}`, which {INDEX} places there")  # type: ignore[index]

    def _index(self) -> dict[str, str] | None:
        if (self.folder / INDEX).exists():
            places = read_json(self.folder, INDEX).get("weight_map")
            if not isinstance(places, dict) or not places or not all(isinstance(v, str) for v in places.values()):
                raise ValueError(f"{self.folder / INDEX}: `weight_map` does not map names of tensors to files")
            for file in set(places.values()):
                if not file.endswith(".safetensors"):
                    raise ValueError(f"{self.folder / INDEX}: {file!r} is not a safetensors file")
            return places
        if not (self.folder / SINGLE).exists():
            pickles = [p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt")]
            why = f"; {pickles[0]} is a pickle, which could run code and is not read" if pickles else ""
            raise ValueError(f"{self.folder} holds neither {SINGLE} nor {INDEX}{why}")
        return None

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = file_inside(self.folder, file)
            if not path.is_file():
                raise ValueError(f"{self.folder / file} is missing")
            with self._naming_the_file(file):
                self._files[file] = safe_open(path, framework="pt", device="cpu").__enter__()
        return self._files[file]

    @contextmanager
    def _naming_the_file(self, file: str) -> Iterator[None]:
        try:
            yield
        except SafetensorError as error:
            raise ValueError(f"{self.folder / file} is not a valid safetensors file: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._home

    def names(self) -> list[str]:
        """The names of all tensors of the folder, sorted."""
        return sorted(self._home)

    def file(self, name: str) -> str:
        """The name of the file that holds tensor `name`."""
        return self._home[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype in safetensors' names: F32, BF16, F16, I32, ..."""
        return str(self._slice(name).get_dtype())

    def _slice(self, name: str) -> Any:
        file = self._home[name]
        with self._naming_the_file(file):
            return self._open(file).get_slice(name)

    def block(self, name: str, starts: Sequence[int] = (), sizes: Sequence[int] = ()) -> Tensor:
        """A copy of elements [starts, starts + sizes) of tensor `name`; omitted trailing dims are whole."""
        cut = tuple(slice(start, start + size) for start, size in zip(starts, sizes))
        with self._naming_the_file(self._home[name]):
            if not cut or 0 in sizes:
                whole: Tensor = self._open(self._home[name]).get_tensor(name)
                return whole[cut].clone(memory_format=torch.contiguous_format)
            part: Tensor = self._slice(name)[cut]
            return part.clone(memory_format=torch.contiguous_format)
