"""Rules of views, permutations and broadcasts: ops that move data and compute nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from tpshard.parallelism.graph import Op, Ref
from tpshard.parallelism.rules import strides
from tpshard.parallelism.rules.entry import Builder, Entry, Strides, Table, answered, decomposed, operand
from tpshard.parallelism.rules.letters import letters, rule_of
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule, broadcast

aten = torch.ops.aten


def reshape_factors(
    factors: Factors, source: Sequence[int], target: Sequence[int]
) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """Builds the factors of the dims of a view's operand and of its result, from major to minor.

    Where the factors so far cover equally many elements of both shapes, the next factor is shared: the gcd of what is
    left of both dims. Otherwise ([2, 3] viewed as [3, 2]) the shape with fewer elements covered gets whole factors of
    its own until both match again.
    """
    dims: tuple[list[list[int]], ...] = ([[] for _ in source], [[] for _ in target])
    left_of = [[n for n in source if n != 1], [n for n in target if n != 1]]
    if 0 in source and left_of[0] != left_of[1]:  # no elements, and so no order of them that dims could share
        return factors.dims(source, Kind.WHOLE), factors.dims(target, Kind.WHOLE)
    places = [[d for d, n in enumerate(shape) if n != 1] for shape in (source, target)]
    covered = [1, 1]

    def append_factor(side: int, factor: int, size: int) -> None:
        dims[side][places[side][0]].append(factor)
        covered[side] *= max(size, 1)
        left_of[side][0] //= max(size, 1)
        if left_of[side][0] <= 1:
            del left_of[side][0], places[side][0]

    while left_of[0] or left_of[1]:
        both = [rest[0] if rest else 1 for rest in left_of]
        common = math.gcd(*both)
        if covered[0] == covered[1] and common != 1:
            shared = factors.new(common)
            append_factor(0, shared, common)
            append_factor(1, shared, common)
        elif covered[0] == covered[1]:
            for side, size in enumerate(both):
                append_factor(side, factors.new(size, Kind.WHOLE), size)
        else:
            side = int(covered[1] < covered[0])
            elements, (gap, uneven) = both[side], divmod(covered[1 - side], covered[side])
            size = gap if not uneven and elements % gap == 0 else elements // common if elements > common else elements
            append_factor(side, factors.new(size, Kind.WHOLE), size)
    return tuple(map(tuple, dims[0])), tuple(map(tuple, dims[1]))


def view(op: Op) -> Rule:
    """The rule of a view: dims of both shapes that are made of the same elements share factors."""
    factors = Factors()
    left, right = reshape_factors(factors, op.operands[0].shape, op.results[0].shape)

    def local(at: LocalOp) -> Any:
        return at.emit(aten.reshape.default, at.inputs[0], list(at.shape()))

    return factors.rule([left], [right], additive=(0,), priority=0, local=local)


def permute(op: Op) -> Rule:
    """The rule of permute: every dim passes."""
    factors = Factors()
    dims = factors.dims(op.operands[0].shape, ones=True)
    order = [d % len(dims) for d in op.args[1]]
    return factors.rule([dims], [tuple(dims[d] for d in order)], additive=(0,), priority=0)


def expand(op: Op) -> Rule:
    """The rule of expand: new and repeated dims of the result have factors that the operand lacks."""
    factors = Factors()
    out = op.results[0].shape
    result = factors.dims(out)
    operand = broadcast(op.operands[0].shape, out, result)

    def local(at: LocalOp) -> Any:
        return at.emit(aten.expand.default, at.inputs[0], list(at.shape()))

    return factors.rule([operand], [result], additive=(0,), priority=0, local=local)


def same_dims(op: Op, dims: Sequence[int], kind: Kind, additive: tuple[int, ...] = (0,), **rest: Any) -> Rule:
    """The rule of an op whose tensors have corresponding dims; `dims`, which may differ in length, are of `kind`."""
    factors = Factors()
    rank = op.results[0].rank
    shapes = [v.shape for v in (*op.operands, *op.results) if v.rank == rank]
    changed = {d % rank for d in dims} if rank else set()
    shared = factors.dims([max(sizes) for sizes in zip(*shapes)], kind, only=changed)

    def of(shape: tuple[int, ...]) -> tuple[Dim, ...]:
        if len(shape) != rank:
            return tuple(() for _ in shape)
        return tuple(shared[d] if d in changed or n != 1 else () for d, n in enumerate(shape))

    operands, results = [of(v.shape) for v in op.operands], [of(v.shape) for v in op.results]
    return factors.rule(operands, results, additive=additive, **rest)


def unlike(rule: Rule, op: Op) -> tuple[int, ...]:
    """The factors of dims whose sizes in the operand and in the result differ."""
    dims = zip(rule.operands[0], op.operands[0].shape, op.results[0].shape)
    return tuple(f for members, before, after in dims if before != after for f in members)


def whole(op: Op, dims: Sequence[int], additive: tuple[int, ...] = (0,)) -> Rule:
    """The rule of an op whose tensors have corresponding dims, of which `dims` must be whole (sort)."""
    return same_dims(op, dims, Kind.WHOLE, additive)


def view_dtype(op: Op) -> Rule:
    """The rule of view(x, dtype): the last dim is whole if the dtype changes its size."""
    alike = op.operands[0].shape == op.results[0].shape
    return rule_of(op, "...->..." if alike else "...N->...M")


# ---- synonyms, which graphs hold as view and permute -------------------------------------------------------------
def as_view(op: Op) -> None:
    """Rewrites an op with the same elements in the same order to a view."""
    op.target, op.args, op.kwargs = aten.view.default, (Ref(0), op.results[0].shape), {}


def as_permute(op: Op) -> None:
    """Rewrites transpose(x, i, j) and t(x) to permute."""
    rank = op.operands[0].rank
    i, j = (op.args[1] % rank, op.args[2] % rank) if len(op.args) > 2 else (0, max(rank - 1, 0))
    order = list(range(rank))
    if rank:
        order[i], order[j] = order[j], order[i]
    op.target, op.args = aten.permute.default, (Ref(0), tuple(order))


def resolve_conjugation(op: Op) -> None:
    """Rewrites a lazy conjugation to a real one, since collectives send bits and would lose the flag."""
    if op.operands:
        op.target = aten._conj_physical.default


def resolve_negation(op: Op) -> None:
    """Rewrites a lazy negation to a real one."""
    op.target = aten.neg.default


def view_entry(rule: Builder, at: Strides, **facts: Any) -> Entry:
    """The entry of a view, which moves no data; `at` computes its result's strides."""
    return Entry(rule, view=at, commutes=True, **facts)


OPS: Table = {
    aten.view.default: view_entry(view, strides.of_view),
    aten.view.dtype: Entry(view_dtype, dense="exactly"),
    aten.reshape: view_entry(view, strides.of_view, canonical=as_view),
    aten._unsafe_view: view_entry(view, strides.of_view, canonical=as_view),
    aten._reshape_alias: view_entry(view, strides.explicit, canonical=as_view),
    aten.unsqueeze: view_entry(view, strides.of_view),
    aten.squeeze: view_entry(view, strides.of_view),
    aten.permute: view_entry(permute, strides.by_torch(aten.permute.default)),
    aten.transpose: view_entry(permute, strides.by_torch(aten.transpose.int), canonical=as_permute),
    aten.t: view_entry(permute, strides.by_torch(aten.t.default), canonical=as_permute),
    aten.expand: view_entry(expand, strides.by_torch(aten.expand.default), broadcasts=True),
    aten.as_strided: Entry(view=strides.explicit),
    aten._conj: Entry(canonical=resolve_conjugation),
    aten._neg_view: Entry(canonical=resolve_negation),
    aten.alias: operand,
    aten.detach: decomposed,  # its decomposition is alias
    aten.lift_fresh: operand,
    aten.lift_fresh_copy: operand,
    getitem: Entry(view=strides.same),
    "_c10d_functional.wait_tensor": Entry(view=strides.same, work="free"),
    aten.contiguous: Entry(view=strides.dense),
    strides.dense_exactly: Entry(view=strides.dense),
    strides.dense_last: Entry(view=strides.last_dense),
    aten.view_as_complex: letters("...P->...", linear="0", view=strides.of_pairs, dense="exactly"),
    aten.view_as_real: letters("...->...P", linear="0", view=strides.into_pairs),
    "prim.device": answered,
}
