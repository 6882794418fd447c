"""Explaining a value's sharding: the propagation steps by which each axis reached it, back to an annotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tpshard.parallelism.mesh import Axes, Axis, Mesh
from tpshard.parallelism.sharding import show_axis
from tpshard.parallelism.why import Explanation, Hop, SourcePlace, Through


class LastStep(NamedTuple):
    """The step in which propagation gave an axis to dim `dim` of a value.

    The axis came from dim `source_dim` of the value `source`, or from an annotation if `source` is empty.
    """

    dim: int
    axis: Axis
    through: Through | None
    source: str
    source_dim: int
    written_at: tuple[SourcePlace, ...]


class ShardingReason(NamedTuple):
    """The sharding of a value, with the propagation step that gave it each of its axes."""

    dims: tuple[Axes, ...]
    annotated: str
    """The value's own annotation, in text form."""
    written_at: tuple[SourcePlace, ...]
    steps: tuple[LastStep, ...]


ReasonLookup = Callable[[str], ShardingReason]
"""Returns the reason of a program's value, given its name; raises KeyError if there is no such value."""


def explanation(reasons: ReasonLookup, mesh: Mesh, name: str) -> Explanation:
    """Explains the sharding of the value `name`: one chain of steps per axis, each ending at an annotation."""
    reason = reasons(name)
    links = [
        hop for dim, axes in enumerate(reason.dims) for axis in axes for hop in chain(reasons, mesh, name, dim, axis)
    ]  # fmt: skip
    return Explanation(reason.annotated, reason.written_at, tuple(links))


def chain(reasons: ReasonLookup, mesh: Mesh, name: str, dim: int, axis: Axis) -> list[Hop]:
    """The steps by which an axis came to a dim of a value, the last one first."""
    links: list[Hop] = []
    visited = set()
    while name and (name, dim) not in visited:
        visited.add((name, dim))
        step = next((step for step in reasons(name).steps if step.dim == dim and step.axis.overlaps(axis)), None)
        if step is None:
            break
        links.append(Hop(show_axis(axis, mesh), name, dim, step.through, step.source, step.source_dim, step.written_at))
        name, dim = step.source, step.source_dim
    return links
