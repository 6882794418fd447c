"""Why things are as they are, as values: what was asked and where, how it spread, what must be moved for it.

Words are made of them at the end, by `parallelism.words`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tpshard.parallelism.graph import Op


class Told(NamedTuple):
    """Where a user, or a default, says something."""

    source: str
    """A file, or what else it stands in."""
    line: int = 0
    """From 1; 0 where the source has no lines."""
    col: int = 0
    says: str = ""
    default: bool = False
    """Nobody wrote it."""


class Through(NamedTuple):
    """An op, without its graph."""

    name: str
    target: str
    module: str = ""


def through(op: Op) -> Through:
    return Through(op.name, getattr(op.target, "__name__", str(op.target)), op.module)


TIE = Through("tie", "tie")
"""A parameter, its gradient and its optimizer state are sharded alike."""


class Hop(NamedTuple):
    """One step of the way of an axis: to a dim of a value, from a dim of another, or from what was told."""

    axis: str
    value: str
    dim: int
    through: Through | None = None
    source: str = ""
    source_dim: int = -1
    told: tuple[Told, ...] = ()


class Explanation(NamedTuple):
    """Why a value is sharded as it is."""

    annotated: str = ""
    """The sharding that was told for it, in text form."""
    told: tuple[Told, ...] = ()
    links: tuple[Hop, ...] = ()
    """A chain for each axis, each to what was told."""

    @property
    def roots(self) -> tuple[Told, ...]:
        """What was told that the value's axes come from, each once."""
        return tuple(dict.fromkeys(told for link in self.links for told in link.told))


@dataclass(frozen=True)
class Demand:
    """Why one value is brought from a layout to another."""

    kind: Literal["sum", "given", "storage", "operand", "neighbours", "others", "sent", "received"]
    """An op made it as a sum over a sharded dim, or it is given as a sum; a boundary with a parameter's storage; an op
    needs it so, or reads what lies next to a device's part, or what every device has made of its part; another stage
    reads it, or has sent it."""
    op: Through
    """What made the sum or what is sent, else what reads."""
    value: str
    before: str = ""
    """Layout, in text form; both are empty where none changes."""
    after: str = ""
    mixes: str = ""
    """The operand for whose sake the op needs a dim whole."""
    axis: str = ""
    """What moves, as far as it is known why it lies there."""
    told: tuple[Told, ...] = ()
    stage: int = -1
    """The other stage."""
