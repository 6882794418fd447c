"""Looks up the transformers class that a folder names in transformers' source, without importing it or torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def class_name(raw: Mapping[str, Any]) -> str:
    """The class that the `architectures` of a config.json name. ValueError where they do not name one."""
    names = raw.get("architectures") or ()
    if not isinstance(names, list) or len(names) != 1:
        raise ValueError(f"config.json: `architectures: {names}` does not name one class")
    return str(names[0])


def task_of_class(raw: Mapping[str, Any]) -> str:
    """The task that the class of a config.json is for: `mlm` for those that predict masked tokens."""
    return "mlm" if any(str(name).endswith("ForMaskedLM") for name in raw.get("architectures") or ()) else "lm"


def check_class(raw: Mapping[str, Any]) -> None:
    """Raises ValueError where `architectures` names no class of the installed transformers, which is not imported."""
    name = class_name(raw)
    if not _has_class(name):
        raise no_class(name)


def no_class(name: str) -> ValueError:
    return ValueError(f"config.json: transformers {version('transformers')} has no model named `{name}`")


def _has_class(name: str) -> bool:
    """Whether a model's file of transformers defines and exports a class."""
    package = find_spec("transformers")
    models = Path(package.origin).parent / "models" if package is not None and package.origin is not None else None
    if models is None or not models.is_dir():
        return True  # importing transformers will tell
    defined, exported = f"\nclass {name}(".encode(), f'"{name}"'.encode()
    for path in models.glob("*/modeling_*.py"):
        source = path.read_bytes()
        if defined in source and exported in source.rpartition(b"\n__all__")[2]:
            return True
    return False
