"""The reasons of shardings: the last steps of propagation to each value, and the chains that these steps make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from tpshard.parallelism.mesh import Axes, Axis, Mesh
from tpshard.parallelism.sharding import show_axis
from tpshard.parallelism.why import Explanation, Hop, SourcePlace, Through


class LastStep(NamedTuple):
    """The propagation of an axis to a dim of a value, from a dim of `source` or, if that is empty, an annotation."""

    dim: int
    axis: Axis
    through: Through | None
    source: str
    source_dim: int
    written_at: tuple[SourcePlace, ...]


class ShardingReason(NamedTuple):
    """The sharding of a value with the last step of each of its axes."""

    dims: tuple[Axes, ...]
    annotated: str
    """The value's own annotation, in text form."""
    written_at: tuple[SourcePlace, ...]
    steps: tuple[LastStep, ...]


class ReasonLookup(Protocol):
    """The reasons of a program's values by name."""

    def __call__(self, name: str) -> ShardingReason:
        """The reason of the value with a name; KeyError if there is none."""
        ...


def explanation(reasons: ReasonLookup, mesh: Mesh, name: str) -> Explanation:
    """Why a value has its sharding: one chain per axis, each ending at an annotation."""
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


@dataclass(frozen=True, eq=False)
class StoredReasons:
    """The reasons of a program that was read from a file, decoded when the first one is asked for."""

    decode: Callable[[], Mapping[str, ShardingReason]]

    @cached_property
    def _reasons(self) -> Mapping[str, ShardingReason]:
        return self.decode()

    def __call__(self, name: str) -> ShardingReason:
        return self._reasons[name]
