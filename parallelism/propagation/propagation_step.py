"""Propagating axes between the tensors of one op, factor by factor.

A step projects the tensors' shardings onto the factors of the op's rule and merges them there, basically (as far as all
agree) or aggressively (every conflict is resolved). `propagate` visits the ops and projects back.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from tpshard.parallelism.factors import extension, parts
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.mesh import Axes, common_prefix, size_of, starts_with, without
from tpshard.parallelism.rules.rule import Direction, Kind, Rule
from tpshard.parallelism.sharding import Sharding
from tpshard.parallelism.why import TIE


def tie(values: Sequence[Value]) -> tuple[Op, Rule]:
    """An op, in no graph, whose results have one common sharding: a parameter, its gradient, its optimizer state."""
    rank = values[0].rank
    dims = tuple((i,) for i in range(rank))
    rule = Rule((), (dims,) * len(values), values[0].shape, (Kind.PASS,) * rank, priority=0)
    return Op(TIE.name, TIE.target, (), {}, [], list(values)), rule


@dataclass(eq=False)
class Edge:
    """An op or a tie, with the tensors between which propagation moves axes and the rule by which it does."""

    op: Op
    rule: Rule
    tensors: list[Value]
    form: int
    """Equal for edges that propagation cannot distinguish, such as those of equal layers."""
    pointwise: bool
    directions: tuple[tuple[Direction, ...], ...]
    """The direction per level and factor."""


class EdgeChange(NamedTuple):
    """The changes that a visit of an edge makes, independent of the names of its tensors."""

    factors: tuple[tuple[int, dict[int, Axes]], ...]
    """Changes as (tensor, its axes per factor)."""
    sources: dict[tuple[int, int], int]
    """The tensor from which the axes of each (tensor, factor) came."""


def directions(rule: Rule, single_use: bool, broadcasts: bool) -> tuple[tuple[Direction, ...], ...]:
    """The direction in which an op propagates each factor, for each level; higher levels include the lower ones.

    0: pass-through ops whose operands have no other reader. 1: all pass-through ops. 2: factors that pass through, of
    any op; broadcasts only backward. 3: all factors. 4: broadcasts forward too.
    """
    passes = tuple([kind is Kind.PASS for kind in rule.kinds])
    return _directions(passes, rule.direction, rule.blocked, rule.priority == 0, single_use, broadcasts)


@cache
def _directions(
    passes: tuple[bool, ...], direction: Direction, blocked: tuple[int, ...], first: bool, single_use: bool,
    broadcasts: bool,
) -> tuple[tuple[Direction, ...], ...]:  # fmt: skip
    """`directions` of an op whose factors pass through or not; `first`: with the priority of pass-through ops."""
    backward, count = Direction.BACKWARD if broadcasts else Direction.BOTH, len(passes)
    levels = [(Direction.NONE,) * count] * 2 + [tuple(backward if one else Direction.NONE for one in passes)]
    levels += [(backward,) * count, (Direction.BOTH,) * count]
    if first and not broadcasts:
        at = 0 if single_use else 1
        levels[at:] = [(Direction.BOTH,) * count] * (5 - at)
    allowed = [Direction.NONE if f in blocked else direction for f in range(count)]
    return tuple(tuple(map(operator.and_, level, allowed)) for level in levels)


class EdgeVisit:
    """A visit of one edge at a level of `directions`: propagates axes between its tensors, factor by factor."""

    def __init__(self, edge: Edge, shardings: Sequence[Sharding], level: int):
        rule = edge.rule
        self.edge, self.sizes, self.count = edge, rule.sizes, len(rule.operands)
        self.barred = [s.barred for s in shardings]
        self.before = [parts(s.dims, s.open, dims, rule.sizes) for s, dims in zip(shardings, rule.tensors)]
        self.parts = [dict(p) for p in self.before]
        self.directions = edge.directions[level]
        self.sources: dict[tuple[int, int], int] = {}

    def basic(self) -> None:
        """Gives all tensors, for each factor, the axes on which they agree, up to the first conflict in any tensor."""
        for f in range(len(self.sizes)):
            axes = self.compatible(f)
            for t in range(len(self.parts)) if axes else ():
                others = self.others(t, f)
                if f in self.parts[t]:
                    axes = extension(self.parts[t][f], axes, self.sizes[f], (*self.barred[t], *others))
                else:
                    axes = without(axes, others)
            for t in range(len(self.parts)) if axes else ():
                self.expand(t, f, axes)

    def aggressive(self) -> None:
        """Gives every tensor all the axes that it can have, even where others cannot; results before operands.

        If factors compete for an axis, the one with the largest source tensor wins, then (for pointwise ops) the one
        with the most axes, the lowest tensor and the lowest factor.
        """
        candidates = [self.compatible(f) for f in range(len(self.sizes))]
        if not any(candidates):
            return
        volumes = [math.prod(self.sizes[f] for f in p) for p in self.parts]

        def rank(f: int) -> tuple[int, int, int, int]:
            sources = [t for t, p in enumerate(self.parts) if f in p and starts_with(p[f].axes, candidates[f])]
            source = max(sources, key=lambda t: (volumes[t], -t), default=-1)
            axes = size_of(candidates[f]) if self.edge.pointwise else 0
            return (-volumes[source] if sources else 1, -axes, source, f)

        order = sorted((f for f in range(len(self.sizes)) if candidates[f]), key=rank)
        for t in (*range(self.count, len(self.parts)), *range(self.count)):
            for f in order:
                part = self.parts[t].get(f)
                if part is None:
                    continue
                free = extension(part, candidates[f], self.sizes[f], self.barred[t])
                if free == part.axes or not starts_with(free, part.axes):
                    continue
                axes = extension(part, free, self.sizes[f], self.others(t, f))
                if self.edge.pointwise and t < self.count:  # an operand is never sharded more than its result
                    for result in self.parts[self.count :]:
                        if f in result and result[f].axes != axes and starts_with(axes, result[f].axes):
                            axes = result[f].axes
                self.expand(t, f, axes)

    def compatible(self, f: int) -> Axes:
        """The longest list of axes of a factor, from the outermost, on which its tensors agree.

        In a one-directional step only the source tensors extend it; the others may shorten it.
        """
        direction = self.directions[f]
        if direction is Direction.NONE:
            return ()
        operands, results = self.parts[: self.count], self.parts[self.count :]
        agreed: Axes = ()
        grows = True
        for group in (results, operands) if direction is Direction.BACKWARD else (operands, results):
            for tensor in group:
                if f not in tensor:
                    continue
                sharded = tensor[f].axes
                shared = common_prefix(agreed, sharded)
                if shared == agreed:
                    agreed = sharded if grows else agreed
                elif shared != sharded:
                    agreed, grows = shared, False
            grows = grows and direction is Direction.BOTH
        return agreed

    def others(self, t: int, f: int) -> Axes:
        """The axes of a tensor's factors other than factor `f`."""
        return tuple(a for g, part in self.parts[t].items() if g != f for a in (*part.axes, *part.overflow))

    def expand(self, t: int, f: int, axes: Axes) -> None:
        """Extends the axes of a tensor's factor, and records the tensor that they come from."""
        part = self.parts[t].get(f)
        if part is None or axes == part.axes or not starts_with(axes, part.axes):
            return
        self.parts[t][f] = part._replace(axes=axes)
        self.sources[(t, f)] = next(
            s for s, p in enumerate(self.before) if s != t and f in p and starts_with(p[f].axes, axes)
        )
