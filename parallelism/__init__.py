"""Parallelism: mesh, shardings, op rules, capture, propagation, partitioner, passes, runtime."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpshard.parallelism.annotate import mesh_split, propagation_barrier, sharding_group
    from tpshard.parallelism.mesh import Mesh
    from tpshard.parallelism.partitioning.manual_regions import (
        all_gather,
        all_to_all,
        axis_index,
        axis_size,
        manual,
        permute,
        pmax,
        psum,
        reduce_scatter,
    )
    from tpshard.parallelism.partitioning.partition import ShardingWarning, partition
    from tpshard.parallelism.program import Program

__all__ = [
    "Mesh", "Program", "ShardingWarning", "all_gather", "all_to_all", "axis_index", "axis_size", "manual", "mesh_split",
    "partition", "permute", "pmax", "propagation_barrier", "psum", "reduce_scatter", "sharding_group",
]  # fmt: skip

_HOMES = {
    "Mesh": "mesh", "Program": "program", "mesh_split": "annotate", "partition": "partitioning.partition",
    "ShardingWarning": "partitioning.partition", "propagation_barrier": "annotate", "sharding_group": "annotate",
}  # fmt: skip
_HOMES |= dict.fromkeys(set(__all__) - set(_HOMES), "partitioning.manual_regions")


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that importing the package does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
