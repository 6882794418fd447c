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
from tpshard.files.folder_json import FolderError
from tpshard.models.folders import hf_headers
from tpshard.models.folders.hf_json import file_inside

BEFORE_NAN = "use an earlier checkpoint, from before the values became non-finite"
"""The fix where weights hold NaN."""


class Tensors:
    """The tensors of a folder by name, in one safetensors file or several.

    Only headers are read until a block is read.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._home = hf_headers.homes(self.folder)
        self._files: dict[str, Any] = {}
        self.coded_weights: dict[str, str] = {}
        """The quantized linear of each weight that is dequantized when read."""

    def _open(self, file: str) -> Any:
        if file not in self._files:
            with self._naming_the_file(file):
                path = file_inside(self.folder, file)
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

    def zero_bias(self, name: str) -> bool:
        """Whether a tensor is a bias that changes nothing; of dense folders none is looked at."""
        return False

    def refuse(self, wrong: Sequence[str]) -> None:
        """Raises ValueError with the first of what is wrong with the tensors, if anything is."""
        if wrong:
            more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
            raise ValueError(f"{self.folder}: {'; '.join(wrong[:5])}{more}")

    def block(self, name: str, starts: Sequence[int] = (), sizes: Sequence[int] = ()) -> Tensor:
        """A copy of elements [starts, starts + sizes) of tensor `name`; omitted trailing dims are whole."""
        cut = tuple(slice(start, start + size) for start, size in zip(starts, sizes))
        with self._naming_the_file(self._home[name]):
            if not cut or 0 in sizes:
                part: Tensor = self._open(self._home[name]).get_tensor(name)[cut]
            else:
                part = self._slice(name)[cut]
            value = part.clone(memory_format=torch.contiguous_format)
        if holds_nan(value):
            raise FolderError(f"`{name}` of {self.folder} holds values that are not numbers (NaN)", BEFORE_NAN)
        return value


def holds_nan(value: Tensor) -> bool:
    """Whether any value of a tensor is NaN. Infinities are values: some biases exclude tokens by them."""
    value = value.float() if value.dtype.itemsize == 1 and value.is_floating_point() else value  # has no sum
    return (
        value.is_floating_point() and not bool(value.sum(dtype=torch.float32).isfinite()) and bool(value.isnan().any())
    )
