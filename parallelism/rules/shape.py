"""Views, permutations, broadcasts, pieces: ops that move data and compute nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from tpshard.parallelism.graph import Op, Ref
from tpshard.parallelism.rules import strides
from tpshard.parallelism.rules.entry import Builder, Entry, Strides, Table, answered, decomposed, operand
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule

aten = torch.ops.aten


def reshape_factors(factors: Factors, source: Sequence[int], target: Sequence[int]) -> tuple[
    tuple[Dim, ...], tuple[Dim, ...]
]:
    """The factors shared by two shapes of one view, from a walk over both, major to minor, by gcd.

    Where they stop agreeing ([2, 3] seen as [3, 2]) the rest of both dims must be whole.
    """
    left: list[list[int]] = [[] for _ in source]
    right: list[list[int]] = [[] for _ in target]
    i = j = 0
    a = source[0] if source else 1
    b = target[0] if target else 1
    while i < len(source) and j < len(target):
        if a == 1:
            i += 1
            a = source[i] if i < len(source) else 1
            continue
        if b == 1:
            j += 1
            b = target[j] if j < len(target) else 1
            continue
        common = math.gcd(a, b)
        if common == 1 or (common != a and common != b):
            end_i, end_j = _block(source, target, i, j, a, b)
            left[i].append(factors.new(a, Kind.WHOLE))
            right[j].append(factors.new(b, Kind.WHOLE))
            for k in range(i + 1, end_i):
                left[k].append(factors.new(source[k], Kind.WHOLE))
            for k in range(j + 1, end_j):
                right[k].append(factors.new(target[k], Kind.WHOLE))
            i, j = end_i, end_j
            a = source[i] if i < len(source) else 1
            b = target[j] if j < len(target) else 1
            continue
        shared = factors.new(common)
        left[i].append(shared)
        right[j].append(shared)
        a, b = a // common, b // common
    return tuple(map(tuple, left)), tuple(map(tuple, right))


def _block(source: Sequence[int], target: Sequence[int], i: int, j: int, a: int, b: int) -> tuple[int, int]:
    """The next pair of positions at which both shapes have covered the same number of elements."""
    i, j = i + 1, j + 1
    while a != b:
        if a < b:
            a, i = a * source[i], i + 1
        else:
            b, j = b * target[j], j + 1
    return i, j


def view(op: Op) -> Rule:
    factors = Factors()
    left, right = reshape_factors(factors, op.operands[0].shape, op.results[0].shape)

    def local(at: LocalOp) -> Any:
        return at.emit(aten.reshape.default, at.inputs[0], list(at.shape()), shape=at.shape())

    return factors.rule([left], [right], additive=(0,), priority=0, local=local)


def permute(op: Op) -> Rule:
    factors = Factors()
    dims = factors.dims(op.operands[0].shape)
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


def mismatch(op: Op, dims: Sequence[int], additive: tuple[int, ...] = (0,)) -> Rule:
    """All dims of operands and results correspond, but for `dims`, which must be whole (slice, pad, flip, sort)."""
    factors = Factors()
    rank = op.results[0].rank
    changed = {d % rank for d in dims} if rank else set()
    shared = [() if d in changed or op.results[0].shape[d] == 1 else (factors.new(op.results[0].shape[d]),)
              for d in range(rank)]

    def of(shape: tuple[int, ...]) -> tuple[Dim, ...]:
        return tuple((factors.new(n, Kind.WHOLE),) if d in changed and n != 1 else shared[d]
                     for d, n in enumerate(shape))

    operands = [of(v.shape) if v.rank == rank else tuple(() for _ in v.shape) for v in op.operands]
    return factors.rule(operands, [of(v.shape) for v in op.results], additive=additive)


def slice_rule(op: Op) -> Rule:
    return mismatch(op, [op.args[1] if len(op.args) > 1 else 0])


def cat(op: Op) -> Rule:
    dim = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)
    if any(v.shape == (0,) for v in op.operands):
        return mismatch(op, range(op.results[0].rank), additive=())
    return mismatch(op, [dim], additive=tuple(range(len(op.operands))))


def split(op: Op) -> Rule:
    dim = op.args[2] if len(op.args) > 2 else op.kwargs.get("dim", 0)
    return mismatch(op, [dim])


def pad(op: Op) -> Rule:
    rank = op.operands[0].rank
    touched = [rank - 1 - i // 2 for i, n in enumerate(op.args[1]) if n]
    value = op.args[2] if len(op.args) > 2 else 0
    return mismatch(op, touched, additive=(0,) if not value else ())


def dims_argument(op: Op) -> Rule:
    """flip, roll: the listed dims are whole."""
    dims = op.args[-1] if op.target is not aten.roll.default else (op.args[2] if len(op.args) > 2 else ())
    rank = op.results[0].rank
    return mismatch(op, dims if dims else range(rank))


def select(op: Op) -> Rule:
    """x[:, i]: the chosen dim is whole and disappears."""
    factors = Factors()
    source = op.operands[0].shape
    dim = op.args[1] % len(source)
    dims = [(factors.new(n, Kind.WHOLE if d == dim else Kind.PASS),) if n != 1 else () for d, n in enumerate(source)]
    return factors.rule([tuple(dims)], [tuple(d for i, d in enumerate(dims) if i != dim)], additive=(0,))


def unbind(op: Op) -> Rule:
    factors = Factors()
    source = op.operands[0].shape
    dim = (op.args[1] if len(op.args) > 1 else 0) % len(source)
    dims = [(factors.new(n, Kind.WHOLE if d == dim else Kind.PASS),) if n != 1 else () for d, n in enumerate(source)]
    out = tuple(d for i, d in enumerate(dims) if i != dim)
    return factors.rule([tuple(dims)], [out] * len(op.results), additive=(0,))


def tril(op: Op) -> Rule:
    """Depends on the position in the last two dims: both whole."""
    return mismatch(op, [-1, -2])


def scatter_slice(op: Op) -> Rule:
    """slice_scatter(x, src, dim, ...): the dim is whole."""
    return mismatch(op, [op.args[2] if len(op.args) > 2 else 0], additive=(0, 1))


# ---- other spellings, which graphs hold as view and permute ---------------------------------------------------------
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


def looks(rule: Builder, at: Strides, **facts: Any) -> Entry:
    """A view: it moves no data and computes nothing."""
    return Entry(rule, view=at, commutes=True, **facts)


OPS: Table = {
    aten.view: looks(view, strides.reshaped),
    aten.reshape: looks(view, strides.reshaped, canonical=as_view),
    aten._unsafe_view: looks(view, strides.reshaped, canonical=as_view),
    aten._reshape_alias: looks(view, strides.reshaped, canonical=as_view),
    aten.unsqueeze: looks(view, strides.reshaped),
    aten.squeeze: looks(view, strides.reshaped),
    aten.permute: looks(permute, strides.permuted),
    aten.transpose: looks(permute, strides.transposed, canonical=as_permute),
    aten.t: looks(permute, strides.turned, canonical=as_permute),
    aten.expand: looks(expand, strides.expanded, broadcasts=True),
    aten.slice: looks(slice_rule, strides.sliced),
    aten.narrow: looks(slice_rule, strides.piece),
    aten.split: looks(split, strides.piece),
    aten.split_with_sizes: looks(split, strides.piece),
    aten.select: looks(select, strides.selected),
    aten.unbind: looks(unbind, strides.selected),
    aten.as_strided: Entry(view=strides.given),
    aten.alias: operand,
    aten.detach: decomposed,  # to alias
    aten.lift_fresh: operand,
    aten.lift_fresh_copy: operand,
    getitem: Entry(view=strides.same),
    "_c10d_functional.wait_tensor": Entry(view=strides.same, work="free"),
    aten.cat: Entry(cat),
    aten.slice_scatter: Entry(scatter_slice),
    aten.constant_pad_nd: Entry(pad),
    aten.flip: Entry(dims_argument),
    aten.roll: Entry(dims_argument, inlined=True),
    aten.tril: Entry(tril),
    aten.triu: Entry(tril),
    aten.size: answered,
    aten.stride: answered,
    aten.storage_offset: answered,
    "prim.device": answered,
}
