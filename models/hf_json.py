"""Reading the small JSON files of a Hugging Face folder safely: names are checked, nothing is executed. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_LARGEST_JSON = 256 << 20


def file_inside(folder: Path, name: str) -> Path:
    """The file `name` of `folder`. ValueError if it is not a plain name, or a link that leads out of the folder.

    Links of the hub's cache into the `blobs` folder beside the snapshot are allowed.
    """
    plain = bool(name) and name not in (".", "..") and not any(c in name for c in "/\\\0:")
    if not plain or not name.isprintable():
        raise ValueError(f"{folder}: {name!r} is not the name of a file in this folder")
    try:
        root, target = folder.resolve(strict=True), (folder / name).resolve()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{folder / name} cannot be followed: {error}") from error
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    if target.parent != root and target.parent != blobs:
        raise ValueError(f"{folder / name} is a link that leads out of the folder, to {target}")
    return target


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in file `name`. ValueError if it holds anything else, OSError if it cannot be read."""
    path = file_inside(folder, name)
    if path.stat().st_size > _LARGEST_JSON:
        raise ValueError(f"{folder / name} is {path.stat().st_size} bytes, too large for a configuration")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{folder / name} holds {type(value).__name__}, not a JSON object")
    return value


def refuse_code(values: Mapping[str, Any], where: Path) -> None:
    """Raises ValueError if a configuration asks to run its own Python code."""
    if values.get("auto_map"):
        raise ValueError(
            f"{where}: `auto_map` asks to run code that came with the model; tpshard never does. "
            "Delete the entry if `architectures` names a class of transformers"
        )
