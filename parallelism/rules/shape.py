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
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule

aten = torch.ops.aten


def reshape_factors(
    factors: Factors, source: Sequence[int], target: Sequence[int]
) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """The factors of a view's two shapes, by walking over both from major to minor.

    Where both have covered equally many elements they share a factor, the gcd of the rest of their dims. Otherwise ([2,
    3] viewed as [3, 2]) the one behind gets factors of its own, which must be whole, so that they match again soon.
    """
    dims: tuple[list[list[int]], ...] = ([[] for _ in source], [[] for _ in target])
    left_of = [[n for n in source if n != 1], [n for n in target if n != 1]]
    places = [[d for d, n in enumerate(shape) if n != 1] for shape in (source, target)]
    covered = [1, 1]

    def put(side: int, factor: int, size: int) -> None:
        dims[side][places[side][0]].append(factor)
        covered[side] *= size
        left_of[side][0] //= size
        if left_of[side][0] == 1:
            del left_of[side][0], places[side][0]

    while left_of[0] or left_of[1]:
        both = [rest[0] if rest else 1 for rest in left_of]
        common = math.gcd(*both)
        if covered[0] == covered[1] and common > 1:
            shared = factors.new(common)
            put(0, shared, common)
            put(1, shared, common)
        elif covered[0] == covered[1]:
            for side, size in enumerate(both):
                put(side, factors.new(size, Kind.WHOLE), size)
        else:
            side = int(covered[1] < covered[0])
            mine, (gap, uneven) = both[side], divmod(covered[1 - side], covered[side])
            size = gap if not uneven and mine % gap == 0 else mine // common if mine > common else mine
            put(side, factors.new(size, Kind.WHOLE), size)
    return tuple(map(tuple, dims[0])), tuple(map(tuple, dims[1]))


def view(op: Op) -> Rule:
    factors = Factors()
    left, right = reshape_factors(factors, op.operands[0].shape, op.results[0].shape)

    def local(at: LocalOp) -> Any:
        return at.emit(aten.reshape.default, at.inputs[0], list(at.shape()), shape=at.shape())

    return factors.rule([left], [right], additive=(0,), priority=0, local=local)


def permute(op: Op) -> Rule:
    factors = Factors()
    dims = factors.dims(op.operands[0].shape, ones=True)
    order = [d % len(dims) for d in op.args[1]]
    return factors.rule([dims], [tuple(dims[d] for d in order)], additive=(0,), priority=0)


def expand(op: Op) -> Rule:
    factors = Factors()
    source, out = op.operands[0].shape, op.results[0].shape
    result = factors.dims(out)
    lead = len(out) - len(source)
    operand = tuple(result[lead + i] if n == out[lead + i] else () for i, n in enumerate(source))

    def local(at: LocalOp) -> Any:
        return at.emit(aten.expand.default, at.inputs[0], list(at.shape()), shape=at.shape())

    return factors.rule([operand], [result], additive=(0,), priority=0, local=local)


def alike(op: Op, dims: Sequence[int], kind: Kind, additive: tuple[int, ...] = (0,), **rest: Any) -> Rule:
    """The rule of an op whose dims all correspond; `dims`, which may differ in length, are factors of `kind`."""
    factors = Factors()
    rank = op.results[0].rank
    tensors = [v for v in (*op.operands, *op.results) if v.rank == rank]
    changed = {d % rank for d in dims} if rank else set()
    shared: list[Dim] = []
    for d in range(rank):
        size = max(v.shape[d] for v in tensors)
        shared.append(() if size == 1 else (factors.new(size, kind if d in changed else Kind.PASS),))

    def of(shape: tuple[int, ...]) -> tuple[Dim, ...]:
        if len(shape) != rank:
            return tuple(() for _ in shape)
        return tuple(shared[d] if d in changed or n != 1 else () for d, n in enumerate(shape))

    operands, results = [of(v.shape) for v in op.operands], [of(v.shape) for v in op.results]
    return factors.rule(operands, results, additive=additive, **rest)


def whole(op: Op, dims: Sequence[int], additive: tuple[int, ...] = (0,)) -> Rule:
    """The rule of an op whose dims all correspond, and whose `dims` must be whole (sort, cumulative sum)."""
    return alike(op, dims, Kind.WHOLE, additive)


def _without(op: Op, *gone: int) -> tuple[Factors, list[Dim], list[Dim]]:
    """The factors of the first operand, with rearranged dims whole; and those of the other dims."""
    factors = Factors()
    shape = op.operands[0].shape
    changed = {d % len(shape) for d in gone}
    dims: list[Dim] = [
        (factors.new(n, Kind.WHOLE if d in changed else Kind.PASS),) if n != 1 else () for d, n in enumerate(shape)
    ]
    return factors, dims, [dim for d, dim in enumerate(dims) if d not in changed]


def _diagonal_of(op: Op, position: int) -> tuple[int, int]:
    """The two dims of a diagonal, which follow its offset in the arguments."""
    given = [*op.args[position + 1 : position + 3], *(0, 1)[max(0, len(op.args) - position - 1) :]]
    return op.kwargs.get("dim1", given[0]), op.kwargs.get("dim2", given[1])


def diagonal(op: Op) -> Rule:
    """diagonal(x, offset, dim1, dim2): the diagonal becomes the last dim."""
    factors, dims, rest = _without(op, *_diagonal_of(op, 1))
    last = factors.dims(op.results[0].shape[-1:], Kind.WHOLE)
    return factors.rule([tuple(dims)], [(*rest, *last)], additive=(0,))


def diagonal_scatter(op: Op) -> Rule:
    """diagonal_scatter(x, source, offset, dim1, dim2)."""
    factors, dims, rest = _without(op, *_diagonal_of(op, 2))
    last = factors.dims(op.operands[1].shape[-1:], Kind.WHOLE)
    return factors.rule([tuple(dims), (*rest, *last)], [tuple(dims)], additive=(0, 1))


def diagonal_backward(op: Op) -> Rule:
    """diagonal_backward(gradient, size, offset, dim1, dim2)."""
    factors = Factors()
    *rest, last = op.operands[0].shape
    lead = list(factors.dims(rest))
    (end,) = factors.dims([last], Kind.WHOLE)
    changed = {d % op.results[0].rank for d in _diagonal_of(op, 2)}
    source, kept = (*lead, end), iter(lead)
    made = tuple(
        factors.dims([n], Kind.WHOLE)[0] if d in changed else next(kept) for d, n in enumerate(op.results[0].shape)
    )
    return factors.rule(
        [source], [made], additive=(0,), local=lambda at: at.with_args(Ref(0), list(at.shape()), *op.args[2:])
    )


def unfold(op: Op) -> Rule:
    """unfold(x, dim, size, step): windows of a dim, with their elements in a new last dim."""
    factors, dims, _ = _without(op, op.args[1])
    dim = op.args[1] % max(op.operands[0].rank, 1)
    count, window = (factors.dims([n], Kind.WHOLE)[0] for n in (op.results[0].shape[dim], op.results[0].shape[-1]))
    made = (*dims[:dim], count, *dims[dim + 1 :], window)
    return factors.rule([tuple(dims)], [made], additive=(0,))


def reread(op: Op) -> Rule:
    """view(x, dtype): the bits of x as another dtype, which may change the size of the last dim."""
    alike = op.operands[0].shape == op.results[0].shape
    return rule_of(op, "...->..." if alike else "...N->...M")


# ---- synonyms, which graphs hold as view and permute -------------------------------------------------------------
def as_view(op: Op) -> None:
    op.target, op.args, op.kwargs = aten.view.default, (Ref(0), op.results[0].shape), {}


def as_permute(op: Op) -> None:
    """transpose(x, i, j), t(x)."""
    rank = op.operands[0].rank
    i, j = (op.args[1] % rank, op.args[2] % rank) if len(op.args) > 2 else (0, max(rank - 1, 0))
    order = list(range(rank))
    if rank:
        order[i], order[j] = order[j], order[i]
    op.target, op.args = aten.permute.default, (Ref(0), tuple(order))


def as_conjugated(op: Op) -> None:
    """Rewrites a lazy conjugation as a real one: collectives send bits and would lose the flag."""
    if op.operands:
        op.target = aten._conj_physical.default


def as_negated(op: Op) -> None:
    op.target = aten.neg.default


def looks(rule: Builder, at: Strides, **facts: Any) -> Entry:
    """The entry of a view: it moves no data and computes nothing."""
    return Entry(rule, view=at, commutes=True, **facts)


OPS: Table = {
    aten.view.default: looks(view, strides.reshaped),
    aten.view.dtype: Entry(reread, dense="all"),
    aten.reshape: looks(view, strides.reshaped, canonical=as_view),
    aten._unsafe_view: looks(view, strides.reshaped, canonical=as_view),
    aten._reshape_alias: looks(view, strides.given, canonical=as_view),
    aten.unsqueeze: looks(view, strides.reshaped),
    aten.squeeze: looks(view, strides.reshaped),
    aten.permute: looks(permute, strides.permuted),
    aten.transpose: looks(permute, strides.transposed, canonical=as_permute),
    aten.t: looks(permute, strides.turned, canonical=as_permute),
    aten.expand: looks(expand, strides.expanded, broadcasts=True),
    aten.unfold: looks(unfold, strides.unfolded),
    aten.diagonal: looks(diagonal, strides.diagonal),
    aten.diagonal_scatter: Entry(diagonal_scatter),
    aten.diagonal_backward: Entry(diagonal_backward),
    aten.as_strided: Entry(view=strides.given),
    aten._conj: Entry(canonical=as_conjugated),
    aten._neg_view: Entry(canonical=as_negated),
    aten.alias: operand,
    aten.detach: decomposed,  # to alias
    aten.lift_fresh: operand,
    aten.lift_fresh_copy: operand,
    getitem: Entry(view=strides.same),
    "_c10d_functional.wait_tensor": Entry(view=strides.same, work="free"),
    aten.contiguous: Entry(view=strides.dense),
    strides.dense_last: Entry(view=strides.last_dense),
    aten.view_as_complex: letters("...P->...", linear="0", view=strides.of_pairs, dense="all"),
    aten.view_as_real: letters("...->...P", linear="0", view=strides.into_pairs),
    "prim.device": answered,
}
