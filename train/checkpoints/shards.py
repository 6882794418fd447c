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
from tpshard.train.checkpoints.store_path import Location, StorePath

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
FIRST = 1 << 16
"""Bytes that are read of a file in a store to find its header."""


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


def write_safetensors(path: Location, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    """Writes a safetensors file, with one tensor at a time in host memory: fsynced in a folder, uploaded to a store.

    Returns its size in bytes and the sha256 of the bytes passed on.

    Raises:
        OSError: disk full, quota, read-only, a store that fails.
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

    return path.write(8 + len(head) + offset, chunks()) if isinstance(path, StorePath) else write_synced(path, chunks())


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


class StoredTensors:
    """A safetensors file in a store, of which only the bytes that are asked for are read.

    Raises:
        OSError: the store fails.
        ValueError: it is no such file.
    """

    def __init__(self, place: StorePath):
        self.place = place
        start = place.read_bytes(0, FIRST)
        length = int.from_bytes(start[:8], "little")
        if 8 + length > len(start):
            start += place.read_bytes(len(start), 8 + length)
        self._data_at = 8 + length
        self._entries: dict[str, Any] = json.loads(start[8 : 8 + length])

    def slice(self, name: str, inside: tuple[slice, ...]) -> torch.Tensor:
        """tensor[inside]. Reads the rows of the first dim that hold it."""
        entry = self._entries[name]
        dtype = next(dtype for dtype, text in DTYPES.items() if text == entry["dtype"])
        shape, (begin, end) = entry["shape"], entry["data_offsets"]
        rows = inside[0] if inside else slice(0, 1)
        row_bytes = (end - begin) // shape[0] if inside else end - begin
        first = self._data_at + begin + rows.start * row_bytes
        data = self.place.read_bytes(first, first + (rows.stop - rows.start) * row_bytes)
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
        if not inside:
            return values.reshape(())
        return values.reshape(rows.stop - rows.start, *shape[1:])[(slice(None), *inside[1:])]
