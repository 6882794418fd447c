"""Blocks of global tensors, and the safetensors files that hold them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes' names in safetensors."""


@dataclass(frozen=True)
class Shard:
    """The block of a global tensor that one rank holds: `tensor` is global[starts : starts + tensor.shape].

    Padding of uneven shards is not included: pass only the part of the local tensor inside `shape`.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.starts) == self.tensor.dim():
            raise ValueError(
                f"a block at {self.starts} of shape {tuple(self.tensor.shape)} in a tensor of {self.shape}"
            )
        for start, size, whole in zip(self.starts, self.tensor.shape, self.shape):
            if start < 0 or start + size > whole:
                raise ValueError(f"block {self.starts} + {tuple(self.tensor.shape)} is outside of {self.shape}")

    @staticmethod
    def whole(tensor: torch.Tensor) -> Shard:
        """A shard for a tensor that every rank holds entirely."""
        return Shard(tensor, tuple(tensor.shape), (0,) * tensor.dim())


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    """Writes a safetensors file, with one tensor at a time in host memory, and fsyncs it.

    Returns its size in bytes and the sha256 of the bytes passed to the disk.

    Raises:
        OSError: disk full, quota, read-only.
    """
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)

    def chunks() -> Iterable[bytes | memoryview]:
        yield len(head).to_bytes(8, "little") + head
        for tensor in tensors.values():
            yield tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data

    return write_synced(path, chunks())


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Writes and fsyncs a file; returns its size and sha256."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
