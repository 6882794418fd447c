"""tpshard: training and serving transformers on more than one device, from a recipe."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpshard.diagnostics.diagnostic import Mistakes as Mistakes
    from tpshard.door import RecipeWarning as RecipeWarning
    from tpshard.door import build as build
    from tpshard.door import load as load
    from tpshard.door import open_model as open_model
    from tpshard.door import stage as stage
    from tpshard.parallelism import Mesh as Mesh
    from tpshard.parallelism import mesh_split as mesh_split
    from tpshard.parallelism import partition as partition

__version__: str

_HOMES = {
    "Mistakes": "diagnostics.diagnostic", "RecipeWarning": "door", "load": "door", "build": "door",
    "open_model": "door", "stage": "door", "Mesh": "parallelism", "mesh_split": "parallelism",
    "partition": "parallelism",
}  # fmt: skip

__all__ = ["Mesh", "Mistakes", "RecipeWarning", "build", "load", "mesh_split", "open_model", "partition", "stage"]


def __getattr__(name: str) -> Any:
    """Imports a name on first use, so that importing the package stays fast. `plan` and `train` are rooms that can be
    called."""
    if name == "__version__":
        return import_module("tpshard.cli.main").version()
    if name in ("plan", "train"):
        return import_module(f"tpshard.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'tpshard' has no attribute {name!r}")
    return getattr(import_module(f"tpshard.{_HOMES[name]}"), name)
