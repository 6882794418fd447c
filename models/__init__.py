"""Models: plain modules that name their dims, and their mapping to Hugging Face folders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpshard.models.assemble import build as build
    from tpshard.models.assemble import build_module as build_module
    from tpshard.models.folders.hf_folder import to_hf as to_hf
    from tpshard.models.open_model import from_hf as from_hf

_HOMES = {
    "build": "assemble",
    "build_module": "assemble",
    "from_hf": "open_model",
    "to_hf": "folders.hf_folder",
}

__all__ = ["build", "build_module", "from_hf", "to_hf"]


def __getattr__(name: str) -> Any:
    """Imports a name that needs torch on first use, so that the presets can be imported without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
