"""Tests for the identity ops of the global graph that carry an annotation, a name or a role of their operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tpshard.parallelism.graph import Graph, Op, Value
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.propagated import Annotation
from tpshard.parallelism.sharding import Sharding
from tpshard.parallelism.why import SourcePlace


def output(x: Any) -> Any:
    """The identity op behind every result of the function, so that a result and its source can differ in sharding."""
    return x


def _is(name: str) -> Callable[[Op], bool]:
    """A test for our identity op `name`."""
    qualified = f"tpshard::{name}"
    return lambda op: getattr(op.target, "_name", None) == qualified


is_named = _is("named")
"""Whether an op names an activation of the model: `named(x, name, dims)`."""
is_split = _is("mesh_split")
"""Whether an op annotates an activation inside the function: `mesh_split(x, sharding)`."""
is_boundary = _is("boundary")
"""Whether an op is where a parameter leaves its storage, or a gradient enters it: `boundary(x, kind, name)`."""
is_grouped = _is("grouped")
"""Whether an op puts its result into a group of tensors with one sharding: `grouped(x, group)`."""
is_role = _is("role")
"""Whether an op states the role of a value in a step: `role(x, role)`."""


def is_anchor(op: Op) -> bool:
    """Whether the op's result has exactly the sharding of its annotation."""
    return op.target is output or is_split(op) or is_boundary(op)


def split_annotations(graph: Graph, mesh: Mesh) -> Mapping[Value, Annotation]:
    """The annotations from `mesh_split` calls inside the function."""
    return {
        op.results[0]: Annotation(
            Sharding.of(mesh, op.args[1], op.results[0].rank), (SourcePlace(f"mesh_split `{op.name}`"),)
        )
        for op in graph.ops if is_split(op)
    }  # fmt: skip
