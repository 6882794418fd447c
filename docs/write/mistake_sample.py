"""One sample mistake: a command, and the files that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

VALIDATE = "validate recipe.yaml"


@dataclass(frozen=True)
class Sample:
    """A recipe, the command that refuses it, and other files. Each is short enough to be read at a glance."""

    recipe: str | bytes = ""
    command: str = VALIDATE
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Name -> content. The text of a file whose name ends with .gz is compressed when it is written."""
    model: bool = False
    """Whether there is also a folder `model` with a small model in Hugging Face format, without a tokenizer."""
