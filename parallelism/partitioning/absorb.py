"""Removing permutations of activations from a program by permuting the parameters that produce them once, in advance.

    y = f(x @ A + a, x @ B)[..., P] @ C   ->   y = f(x @ A[:, P] + a[P], x @ B[:, P]) @ C

Pointwise operations, matrix products, views, and a selection along another dim commute with a permutation of a dim that
they pass through; attention commutes with one of the positions within V's heads. Where an operation does not commute,
the permutation stays where it is. Source: "TP-aware dequantization" (Hoque et al. 2024), here for any function between
two matrix products.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from tpshard.parallelism.graph import Graph, Op, Value
from tpshard.parallelism.rules.rule import Dim, Rule
from tpshard.parallelism.rules.table import entry_of, rule_for


@dataclass(frozen=True)
class Reordered:
    """A dim whose positions are permuted within each of `blocks` equal parts.

    If `outer` is given, the parts are one for each index of dim `outer`.
    """

    dim: int
    blocks: int = 1
    outer: int | None = None


@dataclass(frozen=True)
class Stopped:
    """What keeps a permutation where it is: an operation that it cannot be moved through, or an input of the graph."""

    at: Op | Value
    why: str

    def __str__(self) -> str:
        if isinstance(self.at, Value):
            return f"`{self.at.name}` {self.why}"
        packet = getattr(self.at.target, "overloadpacket", self.at.target)
        return f"`{packet.__name__}`{f' in {self.at.module}' if self.at.module else ''} {self.why}"


def absorb(
    graph: Graph, op: Op, parameters: Collection[Value], positions: Mapping[Op, float], alike: int = 1
) -> dict[Value, Reordered] | Stopped:
    """Removes `op`, a `tpshard::reorder`, if the parameters that compute its operand can be permuted instead.

    Returns these parameters with their permuted dims. A parameter may have fewer blocks than `op`, if each run of
    `alike` neighbouring blocks has one order. Leaves the graph unchanged if an operation in between mixes positions, or
    its result has other readers, and returns the one nearest to `op`. positions: where each operation stands.
    """
    x = op.operands[0]
    blocks = op.args[2]
    wanted = {x: [(Reordered(x.rank - 1, blocks), alike)]}
    passed = {op}
    moved: dict[Value, Reordered] = {}
    while wanted:  # the last value first, so that all of its readers that can be passed have been
        value = max(wanted, key=lambda one: -1.0 if one.producer is None else positions[one.producer])
        (place, alike), *others = wanted.pop(value)
        at = value.producer or value
        if any(other != place for other, _ in others) or value in graph.outputs:
            return Stopped(at, "has a result that is read in another order too")
        if (reader := next((user for user in value.users if user not in passed), None)) is not None:
            return Stopped(reader, "reads the same values")
        if value.producer is None:
            if value not in parameters or place.outer is not None:
                return Stopped(at, "is not a parameter whose columns can be permuted so")
            moved[value] = place
            continue
        behind = _operand_permutations(value.producer, place, alike)
        if behind is None:
            entry = entry_of(value.producer.target)
            joins = (
                "joins dims that the order crosses" if entry.commutes and value.producer.operands else "mixes positions"
            )
            return Stopped(at, "keeps orders within heads alone" if entry.carries is not None else joins)
        passed.add(value.producer)
        for source, there, share in behind:
            wanted.setdefault(source, []).append((there, share))
    graph.replace(op.results[0], x)
    graph.ops.remove(op)
    for operand in op.operands:
        operand.users.remove(op)
    return moved


def _operand_permutations(op: Op, place: Reordered, alike: int) -> list[tuple[Value, Reordered, int]] | None:
    """The permutations of an op's operands that together permute its result as `place` says; None if none do."""
    entry = entry_of(op.target)
    if entry.carries is not None:
        value, outer = op.operands[entry.carries], entry.heads_dim
        kv_heads = value.shape[outer]
        if (place.dim, place.outer) != (3, outer) or alike % (share := place.blocks // kv_heads):
            return None
        return [(value, Reordered(3, kv_heads, outer if kv_heads > 1 else None), alike // share)]
    if not entry.commutes or not op.operands or len(op.results) != 1:
        return None
    rule = rule_for(op)
    passed = set(rule.results[0][place.dim])
    permuted = []
    for value, dims in zip(op.operands, rule.operands):
        if not passed & {f for dim in dims for f in dim}:
            continue  # broadcast along the dim
        operand_place = _in_operand(rule, dims, place)
        if operand_place is None:
            return None
        permuted.append((value, operand_place, alike))
    return permuted or None


def _in_operand(rule: Rule, dims: tuple[Dim, ...], place: Reordered) -> Reordered | None:
    """The permutation `place` of an op's result as one of an operand's dims; None if it cannot be expressed there."""
    where: Mapping[Dim, int] = {dim: i for i, dim in enumerate(dims) if dim}
    inner = rule.results[0][place.dim]
    if place.outer is None:
        if inner in where:
            return replace(place, dim=where[inner])
        for i, (first, second) in enumerate(itertools.pairwise(dims)):
            # in the operand the blocks are a dim of their own
            if first + second == inner and math.prod(rule.sizes[f] for f in first) == place.blocks:
                return Reordered(i + 1, place.blocks, i)
        return None
    outer = rule.results[0][place.outer]
    if inner in where and outer in where:
        return Reordered(where[inner], place.blocks, where[outer])
    return Reordered(where[outer + inner], place.blocks) if outer + inner in where else None
