"""The tensors of a Hugging Face folder by file, from the headers of its safetensors. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tpshard.files.folder_json import damaged
from tpshard.models.folders.foreign_formats import PICKLES, pickled
from tpshard.models.folders.hf_json import file_inside, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the format."""


def has_weights(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has weights. ValueError where it has only pickles, or safetensors under other names."""
    place = Path(folder)
    if not any(file.suffix in (*PICKLES, ".safetensors") or file.name == INDEX for file in place.iterdir()):
        return False
    _places(place, _stem(place))
    return True


def homes(folder: str | os.PathLike[str]) -> dict[str, str]:
    """The file of each tensor. ValueError for pickles, and for files that are missing, damaged or contradict the
    index."""
    place = Path(folder)
    if not place.is_dir():
        raise ValueError(f"{place} is not a folder")
    stem = _stem(place)
    places, index = _places(place, stem), f"{stem}.safetensors.index.json"
    homes: dict[str, str] = {}
    for file in [f"{stem}.safetensors"] if places is None else sorted(set(places.values())):
        for name in entries(place, file):
            if places is not None and places.get(name) != file:
                raise damaged(f"{place / file} holds `{name}`, which {index} does not place there")
            homes[name] = file
    missing = sorted(set(places or ()) - set(homes))
    if missing and places is not None:
        raise damaged(f"{place / places[missing[0]]} lacks `{missing[0]}`, which {index} places there")
    return homes


def _stem(folder: Path) -> str:
    """The name of the weights' file without `.safetensors`: `model`, or in a GPTQ folder as AutoGPTQ names it.

    AutoGPTQ writes `model_file_base_name`, or else gptq_model-4bit-128g (bits, size of a group), before `.safetensors`
    and `.safetensors.index.json`. The only file of a GPTQ folder may have any name.
    """
    settings: Any = None
    for name, key in (("config.json", "quantization_config"), ("quantize_config.json", None)):
        if settings is None and (folder / name).is_file():
            raw = read_json(folder, name)
            settings = raw.get(key) if key else raw
    if not isinstance(settings, dict):
        return "model"
    named = f"gptq_model-{settings.get('bits')}bit-{settings.get('group_size')}g"
    for stem in ("model", str(settings.get("model_file_base_name")), named):
        if not {"/", "\\", "\0"} & set(stem) and any((folder / f"{stem}{end}").exists() for end in _ENDS):
            return stem
    only = [path.name.removesuffix(_ENDS[0]) for path in folder.iterdir() if path.name.endswith(_ENDS[0])]
    return only[0] if len(only) == 1 else "model"


_ENDS = (".safetensors", ".safetensors.index.json")


def _places(folder: Path, stem: str) -> dict[str, str] | None:
    """The file of each tensor as the index says; None for a single file without an index."""
    single, index = (f"{stem}{end}" for end in _ENDS)
    if (folder / index).exists():
        places = read_json(folder, index).get("weight_map")
        if not isinstance(places, dict) or not places or not all(isinstance(v, str) for v in places.values()):
            raise ValueError(f"{folder / index}: `weight_map` does not map names of tensors to files")
        for file in set(places.values()):
            if not file.endswith(".safetensors"):
                raise ValueError(f"{folder / index}: {file!r} is not a safetensors file")
        return places
    if not (folder / single).exists():
        raise pickled(folder, f"{single} nor {index}")
    return None


def entries(folder: Path, file: str) -> dict[str, Any]:
    """The entries of a safetensors file by tensor, as its header has them. ValueError for a damaged or cut file."""
    path = file_inside(folder, file)
    if not path.is_file():
        raise damaged(f"{folder / file} is missing")
    with path.open("rb") as stream:
        length, total = int.from_bytes(stream.read(8), "little"), path.stat().st_size
        try:
            if not 2 <= length <= min(_LARGEST_HEADER, total - 8):
                raise ValueError(f"its header would have {length} bytes")
            tensors: dict[str, Any] = json.loads(stream.read(length))
            tensors.pop("__metadata__", None)
            end = 0
            for start, stop in sorted(entry["data_offsets"] for entry in tensors.values()):
                if start != end or stop < start:
                    raise ValueError("its tensors overlap or leave gaps")
                end = stop
            if total != 8 + length + end:
                raise ValueError(f"it has {total} bytes, and its header says {8 + length + end}")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            reason = str(error) if isinstance(error, ValueError) else "its header is not that of tensors"
            raise damaged(f"{folder / file} is not a valid safetensors file: {reason}") from error
    return tensors
