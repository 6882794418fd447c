"""How it is spread: mesh, sharding, op rules, capture, propagate, partition, passes, runtime."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpshard.parallelism.annotate import mesh_split
    from tpshard.parallelism.mesh import Mesh
    from tpshard.parallelism.partitioner import partition
    from tpshard.parallelism.program import Program

__all__ = ["Mesh", "Program", "mesh_split", "partition"]

_HOMES = {"mesh_split": "annotate", "Mesh": "mesh", "partition": "partitioner", "Program": "program"}


def __getattr__(name: str) -> Any:
    """Imports what needs torch when it is asked for: the launcher of a run starts without it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
