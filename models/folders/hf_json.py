"""What the small JSON files of a Hugging Face folder may say: nothing that runs code. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpshard.files.folder_json import file_inside, read_json

__all__ = ["TOKENIZER", "file_inside", "read_json", "refuse_code"]

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


def refuse_code(values: Mapping[str, Any], where: Path) -> None:
    """Raises ValueError if a configuration asks to run its own Python code."""
    if values.get("auto_map"):
        raise ValueError(
            f"{where}: `auto_map` asks to run code that came with the model; tpshard never does. "
            "Delete the entry if `architectures` names a class of transformers"
        )
