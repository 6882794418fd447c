"""What identifies a model's folder for saved plans and caches, without torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from tpshard.files.folder_json import read_regular
from tpshard.models.folders.foreign_formats import MODELOPT
from tpshard.models.folders.hf_headers import entries, has_weights, homes

CONFIGS = ("config.json", "quantize_config.json", MODELOPT)


def folder_identity(folder: str | os.PathLike[str]) -> dict[str, str]:
    """The hash of each file that describes a folder's model, by its path."""
    paths = [Path(folder, name) for name in CONFIGS]
    return {str(path): _hash(read_regular(path)) for path in paths if path.is_file()}


def adapters_identity(folder: str | os.PathLike[str]) -> dict[str, str]:
    """The hash of what a plan reads of a folder with adapters: their settings."""
    path = Path(folder, "adapter_config.json")
    return {str(path): _hash(read_regular(path))} if path.is_file() else {}


def weights_identity(folder: str | os.PathLike[str]) -> dict[str, str]:
    """The hash of what a plan reads of a folder's weights: names, shapes and places of tensors, and the order of the
    inputs of act-order layers (`g_idx`). ValueError and OSError as `hf_headers.homes`."""
    if not has_weights(folder):
        return {}
    identity = {}
    for file in sorted(set(homes(folder).values())):
        hashed, tensors = hashlib.sha256(), entries(Path(folder), file)
        with Path(folder, file).open("rb") as stream:
            data = 8 + int.from_bytes(stream.read(8), "little")
            for name, entry in sorted(tensors.items()):
                hashed.update(f"{name} {entry['dtype']} {entry['shape']}".encode())
                if name.endswith(".g_idx"):
                    first, end = entry["data_offsets"]
                    stream.seek(data + first)
                    hashed.update(stream.read(end - first))
        identity[str(Path(folder, file))] = hashed.hexdigest()[:16]
    return identity


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
