"""Identities of the global graph that hold an annotation: results, boundaries, `mesh_split`, the model's names."""

from __future__ import annotations

from typing import Any

from tpshard.parallelism.graph import Op


def output(x: Any) -> Any:
    """Marks a result of the function, so that its annotation is its own and not its producer's."""
    return x


def is_named(op: Op) -> bool:
    """Whether the model names an activation here: `named(x, name, dims)`."""
    return str(op.target) == "tpshard.named.default"


def is_split(op: Op) -> bool:
    """Whether the model annotates an activation here: `mesh_split(x, axes, dims_mapping)`."""
    return str(op.target) == "tpshard.mesh_split.default"


def is_boundary(op: Op) -> bool:
    """Whether a parameter leaves its storage here, or a gradient enters it: `boundary(x, kind, name)`."""
    return str(op.target) == "tpshard.boundary.default"


def is_grouped(op: Op) -> bool:
    """Whether the result is sharded as all of its group are: `grouped(x, group)`."""
    return str(op.target) == "tpshard.grouped.default"


def is_role(op: Op) -> bool:
    """Whether it is said here what a value is: `role(x, role)`."""
    return str(op.target) == "tpshard.role.default"


def is_anchor(op: Op) -> bool:
    """Whether the result has exactly the sharding that it was given."""
    return op.target is output or is_split(op) or is_boundary(op)
