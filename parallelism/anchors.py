"""Identities of the global graph that hold an annotation: results, boundaries, `mesh_split`, the model's names."""

from __future__ import annotations

from typing import Any

from tpshard.parallelism.graph import Op

ACTIVATIONS = {"tpshard.named.default", "tpshard.mesh_split.default"}
"""Ops whose results are activations that a user annotates."""
ANCHORS = {"tpshard.mesh_split.default", "tpshard.boundary.default", "tpshard.output"}
"""Identities whose result has exactly the sharding that it was given."""


def output(x: Any) -> Any:
    """Marks a result of the function, so that its annotation is its own and not its producer's."""
    return x


def is_anchor(op: Op) -> bool:
    return op.target is output or str(op.target) in ANCHORS


def is_boundary(op: Op) -> bool:
    """Whether a parameter leaves its storage here, or a gradient enters it."""
    return str(op.target) == "tpshard.boundary.default"
