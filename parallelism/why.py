"""The reasons of shardings and collectives as data: annotations, steps of propagation and their chains, and demands.

`parallelism.words` turns them into text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from tpshard.parallelism.mesh import Axes, Axis, Mesh
from tpshard.parallelism.sharding import show_axis

if TYPE_CHECKING:
    from tpshard.parallelism.graph import Op


class SourcePlace(NamedTuple):
    """Where an annotation comes from: a place in a recipe or in a call, or a default."""

    source: str
    """The file, or a description of the call."""
    line: int = 0
    """The line, from 1; 0 if the source has no lines."""
    col: int = 0
    says: str = ""
    default: bool = False
    """Whether it is a default that the user did not write."""


class Through(NamedTuple):
    """An op through which an axis propagated, by name and without its graph."""

    name: str
    target: str
    module: str = ""


def through(op: Op) -> Through:
    return Through(op.name, getattr(op.target, "__name__", str(op.target)), op.module)


TIE = Through("tie", "tie")
"""The tie of a parameter with its gradient and optimizer state, which have one sharding."""


class Hop(NamedTuple):
    """One step of an axis's propagation: to a dim of a value, from a dim of another value or from an annotation."""

    axis: str
    value: str
    dim: int
    through: Through | None = None
    source: str = ""
    source_dim: int = -1
    written_at: tuple[SourcePlace, ...] = ()


class Explanation(NamedTuple):
    """The reasons of a value's sharding."""

    annotated: str = ""
    """The value's own annotation, in text form."""
    written_at: tuple[SourcePlace, ...] = ()
    links: tuple[Hop, ...] = ()
    """One chain per axis, each ending at an annotation."""

    @property
    def roots(self) -> tuple[SourcePlace, ...]:
        """The annotations that the value's axes come from, each once."""
        return tuple(dict.fromkeys(place for link in self.links for place in link.written_at))


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


@dataclass(frozen=True)
class Demand:
    """Why a collective moves a value: what needs it in another layout or on another device."""

    kind: Literal["sum", "given", "storage", "operand", "neighbours", "others", "sent", "received"]
    """sum: an op computes it as a sum over a sharded dim. given: it is an input that is a sum. storage: a boundary with
    a parameter's storage. operand: an op needs this layout. neighbours: an op reads elements beside a shard. others: an
    op reads every device's result. sent, received: another pipeline stage reads it, or has sent it."""
    op: Through
    """The op that computes the sum or the sent value, else the reader."""
    value: str
    before: str = ""
    """The layout in text form; empty, like `after`, if no layout changes."""
    after: str = ""
    mixes: str = ""
    """The operand because of which the op needs a dim whole."""
    axis: str = ""
    """The moved axis with its origin, if known."""
    written_at: tuple[SourcePlace, ...] = ()
    stage: int = -1
    """The other pipeline stage."""
