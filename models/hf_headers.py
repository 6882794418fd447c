"""The tensors of a Hugging Face folder by file, from the headers of its safetensors. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tpshard.kernels.folder_json import damaged
from tpshard.models.foreign_formats import PICKLES, pickled
from tpshard.models.hf_json import file_inside, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the format."""


def has_weights(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has weights. ValueError where it has only pickles, or safetensors under other names."""
    place = Path(folder)
    if not any(file.suffix in (*PICKLES, ".safetensors") or file.name == INDEX for file in place.iterdir()):
        return False
    _places(place)
    return True


def homes(folder: str | os.PathLike[str]) -> dict[str, str]:
    """The file of each tensor. ValueError for pickles, and for files that are missing, damaged or contradict the
    index."""
    place = Path(folder)
    if not place.is_dir():
        raise ValueError(f"{place} is not a folder")
    places = _places(place)
    homes: dict[str, str] = {}
    for file in [SINGLE] if places is None else sorted(set(places.values())):
        for name in _header(place, file):
            if places is not None and places.get(name) != file:
                raise damaged(f"{place / file} holds `{name}`, which {INDEX} does not place there")
            homes[name] = file
    missing = sorted(set(places or ()) - set(homes))
    if missing and places is not None:
        raise damaged(f"{place / places[missing[0]]} lacks `{missing[0]}`, which {INDEX} places there")
    return homes


def _places(folder: Path) -> dict[str, str] | None:
    """The file of each tensor as the index says; None for a single file without an index."""
    if (folder / INDEX).exists():
        places = read_json(folder, INDEX).get("weight_map")
        if not isinstance(places, dict) or not places or not all(isinstance(v, str) for v in places.values()):
            raise ValueError(f"{folder / INDEX}: `weight_map` does not map names of tensors to files")
        for file in set(places.values()):
            if not file.endswith(".safetensors"):
                raise ValueError(f"{folder / INDEX}: {file!r} is not a safetensors file")
        return places
    if not (folder / SINGLE).exists():
        raise pickled(folder, f"{SINGLE} nor {INDEX}")
    return None


def _header(folder: Path, file: str) -> dict[str, Any]:
    """The entries of a safetensors file by tensor, as its header has them. ValueError for a damaged or cut file."""
    path = file_inside(folder, file)
    if not path.is_file():
        raise damaged(f"{folder / file} is missing")
    with path.open("rb") as stream:
        length, total = int.from_bytes(stream.read(8), "little"), path.stat().st_size
        try:
            if not 2 <= length <= min(_LARGEST_HEADER, total - 8):
                raise ValueError(f"its header would have {length} bytes")
            entries: dict[str, Any] = json.loads(stream.read(length))
            entries.pop("__metadata__", None)
            end = 0
            for start, stop in sorted(entry["data_offsets"] for entry in entries.values()):
                if start != end or stop < start:
                    raise ValueError("its tensors overlap or leave gaps")
                end = stop
            if total != 8 + length + end:
                raise ValueError(f"it has {total} bytes, and its header says {8 + length + end}")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            reason = str(error) if isinstance(error, ValueError) else "its header is not that of tensors"
            raise damaged(f"{folder / file} is not a valid safetensors file: {reason}") from error
    return entries
