"""Rules of slices, padding, shifts, concatenation along a dim, and of what lies beside a diagonal or on it.

If the dim is sharded, devices read their neighbours (`Rule.windows`); it is gathered whole where that is cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from tpshard.parallelism.graph import Op, Ref
from tpshard.parallelism.rules import decompositions as by
from tpshard.parallelism.rules import strides
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.indexing import pick_own
from tpshard.parallelism.rules.rule import Factors, Kind, LocalOp, Rule, Window
from tpshard.parallelism.rules.shape import same_dims, view_entry, whole
from tpshard.parallelism.sharding import spans

aten = torch.ops.aten


def with_windows(rule: Rule, windows: Sequence[Window], moving: bool = False) -> Rule:
    """Adds windows, through which tensors read others, to a rule."""
    with_factor: list[tuple[int, Window]] = []
    for window in windows:
        members = rule.tensors[window.read][window.dim]
        with_factor.extend((f, window) for f in members)
    return replace(rule, windows=tuple(with_factor), moving=moving)


def cut_dims(at: LocalOp, rule: Rule) -> set[int]:
    """The sharded dims of the first operand along which elements move."""
    return {
        d for d, members in enumerate(rule.operands[0])
        for f in members if at.axes(f) and rule.kinds[f] is Kind.PERMUTE
    }  # fmt: skip


# ---- slices ---------------------------------------------------------------------------------------------------------
def bounds(op: Op, position: int) -> tuple[int, int, int, int]:
    """The dim, start, end and step of a slice, from the op's arguments from `position` on."""
    args = (*op.args[position : position + 4], *(None,) * 4)
    dim, start, end, step = (args[0] or 0) % op.operands[0].rank, args[1] or 0, args[2], args[3] or 1
    size = op.operands[0].shape[dim]
    start = min(max(start + size if start < 0 else start, 0), size)
    end = size if end is None else min(max(end + size if end < 0 else end, start), size)
    return dim, start, end, step


def slice_rule(op: Op) -> Rule:
    """The rule of narrow and x[start:end:step]: devices of a sharded dim read their neighbours."""
    if op.target is aten.narrow.default:
        dim, start, step = op.args[1] % op.operands[0].rank, op.args[2], 1
    else:
        dim, start, _, step = bounds(op, 1)

    def local(at: LocalOp) -> Any:
        if not cut_dims(at, rule):
            return at.same()
        return at.window(0)

    rule = same_dims(op, [dim], Kind.PERMUTE, local=local)
    rule = with_windows(rule, [Window(0, dim, 1, dim, first=start, stride=step)], moving=True)
    return replace(rule, others=(pick_positions(op, dim, range(start, start + step * op.results[0].shape[dim], step)),))


def pick_positions(op: Op, dim: int, positions: range) -> Rule:
    """The rule of picking positions of a dim: over a sharded dim the result is a sum of what each device has."""
    x, out = op.operands[0], op.results[0]
    keep = out.rank == x.rank
    factors = Factors()
    chosen = factors.new(x.shape[dim], Kind.REDUCE if out.dtype != torch.bool else Kind.WHOLE)
    before, behind = factors.dims(x.shape[:dim]), factors.dims(x.shape[dim + 1 :])

    def local(at: LocalOp) -> Any:
        if not at.axes(chosen):
            return at.same()
        index = at.emit(aten.arange.start_step, positions.start, positions.stop, positions.step, dtype=torch.int64)
        rows = pick_own(at, index, chosen, dim)
        return rows if keep else at.emit(aten.squeeze.dim, rows, dim)

    source, picked = (*before, (chosen,), *behind), (*before, *([()] if keep else []), *behind)
    return factors.rule([source], [picked], additive=(0,), local=local, guarded=(chosen,))


def select(op: Op) -> Rule:
    """The rule of x[:, i]: over a sharded dim the result is a sum, to which only the device with index i adds."""
    x = op.operands[0]
    dim = op.args[1] % x.rank
    index = op.args[2] % x.shape[dim]
    return pick_positions(op, dim, range(index, index + 1))


def unbind(op: Op) -> Rule:
    """The rule of unbind, which returns all positions of a dim separately: the dim must be whole."""
    factors = Factors()
    source = op.operands[0].shape
    dim = (op.args[1] if len(op.args) > 1 else 0) % len(source)
    dims = factors.dims(source, Kind.WHOLE, only=[dim])
    return factors.rule([dims], [(*dims[:dim], *dims[dim + 1 :])] * len(op.results), additive=(0,))


def split(op: Op) -> Rule:
    """The rule of split and chunk: one window of a sharded dim per result."""
    dim = (op.args[2] if len(op.args) > 2 else op.kwargs.get("dim", 0)) % op.operands[0].rank
    starts = [0, *accumulate(result.shape[dim] for result in op.results)]

    def local(at: LocalOp) -> Any:
        if not cut_dims(at, rule):
            return at.same()
        return [at.window(0, 1 + i) for i in range(len(op.results))]

    rule = same_dims(op, [dim], Kind.PERMUTE, local=local)
    return with_windows(
        rule, [Window(0, dim, 1 + i, dim, first=starts[i]) for i in range(len(op.results))], moving=True
    )


# ---- shifts ---------------------------------------------------------------------------------------------------------
def pad(op: Op) -> Rule:
    """The rule of constant_pad_nd(x, widths, value): devices of a sharded dim read their neighbours.

    A negative width crops.
    """
    rank, widths = op.operands[0].rank, [*op.args[1]]
    value = (op.args[2] if len(op.args) > 2 else op.kwargs.get("value", 0)) or 0
    before = {rank - 1 - i // 2: widths[i] for i in range(0, len(widths), 2) if widths[i] or widths[i + 1]}

    def local(at: LocalOp) -> Any:
        cut = cut_dims(at, rule)
        if not cut:
            return at.same()
        node = at.window(0)
        for d in cut:
            first, last = max(before[d], 0), before[d] + op.operands[0].shape[d]
            (f,) = rule.results[0][d]
            if last < op.results[0].shape[d]:
                node = at.emit(aten.masked_fill.Scalar, node, from_on(at, f, d, last), value)
            if first > 0:
                inside = from_on(at, f, d, first)
                node = at.emit(aten.masked_fill.Scalar, node, at.emit(aten.logical_not.default, inside), value)
        rest = [0 if rank - 1 - i // 2 in cut else n for i, n in enumerate(widths)]
        return at.emit(aten.constant_pad_nd.default, node, rest, value) if any(rest) else node

    rule = same_dims(op, list(before), Kind.PERMUTE, (0,) if not value else (), local=local)
    return with_windows(rule, [Window(0, d, 1, d, first=-n, fill=value) for d, n in before.items()], moving=True)


def roll(op: Op) -> Rule:
    """The rule of roll(x, shifts, dims): devices of a sharded dim send what crosses the ends of their shards."""
    x = op.operands[0]
    dims = op.args[2] if len(op.args) > 2 else op.kwargs.get("dims", ())
    shifts = [op.args[1]] if isinstance(op.args[1], int) else [*op.args[1]]
    if not dims and x.rank != 1:  # rolls the flattened tensor
        return whole(op, range(x.rank))
    moved: dict[int, int] = {}
    for d, n in zip([d % x.rank for d in dims] or [0], shifts):
        moved[d] = (moved.get(d, 0) + n) % max(x.shape[d], 1)

    def local(at: LocalOp) -> Any:
        cut = cut_dims(at, rule)
        rest = {d: n for d, n in moved.items() if d not in cut}
        node = at.window(0)
        return at.emit(aten.roll.default, node, list(rest.values()), list(rest)) if rest else node

    rule = same_dims(op, list(moved), Kind.PERMUTE, local=local)
    windows = [Window(0, d, 1, d, first=first) for d, n in moved.items() for first in (-n, x.shape[d] - n)]
    return with_windows(rule, windows, moving=True)


def flip(op: Op) -> Rule:
    """The rule of flip: devices of a sharded dim get the elements of theirs, which they flip."""
    dims = [d % op.operands[0].rank for d in op.args[1]]

    def local(at: LocalOp) -> Any:
        return at.emit(aten.flip.default, at.window(0), dims) if dims else at.window(0)

    rule = same_dims(op, dims, Kind.PERMUTE, local=local)
    return with_windows(rule, [Window(0, d, 1, d, mirrored=True) for d in dims], moving=True)


# ---- tensors put together -------------------------------------------------------------------------------------------
def cat(op: Op) -> Rule:
    """The rule of cat: a device of a sharded dim reads the parts of the operands that belong to its shard."""
    out = op.results[0]
    dim = (op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)) % out.rank
    if any(v.shape == (0,) for v in op.operands):
        return whole(op, range(out.rank), additive=())
    starts = [0, *accumulate(value.shape[dim] for value in op.operands)]

    def local(at: LocalOp) -> Any:
        if not cut_dims(at, rule):
            return at.same()
        return at.window(0)

    rule = same_dims(op, [dim], Kind.PERMUTE, tuple(range(len(op.operands))), local=local)
    windows = [Window(i, dim, len(starts) - 1, dim, first=-starts[i]) for i in range(len(op.operands))]
    return with_windows(rule, windows, moving=True)


def without_ones(op: Op) -> None:
    """Rewrites a flip of dims of size 1 alone, which stay as they are, to a view, and leaves them out beside others."""
    (x,), rank = op.operands, op.operands[0].rank
    dims = [d for d in op.args[1] if x.shape[d % rank] != 1]
    op.target, op.args = (op.target, (Ref(0), dims)) if dims else (aten.view.default, (Ref(0), list(x.shape)))


def without_empty(op: Op) -> None:
    """Removes operands that are empty along the concatenated dim; one operand alone is a view."""
    dim = (op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)) % op.results[0].rank
    nonempty = [value for value in op.operands if value.rank > dim and value.shape[dim]]
    alike = all(value.dtype == op.results[0].dtype for value in op.operands)
    if alike and nonempty and (len(nonempty) < len(op.operands) or len(nonempty) == 1):
        op.args, op.kwargs, op.operands = ([Ref(i) for i in range(len(nonempty))], dim), {}, nonempty
        if len(nonempty) == 1:
            op.target, op.args = aten.view.default, (Ref(0), list(op.results[0].shape))


def from_on(at: LocalOp, factor: int, dim: int, start: int) -> Any:
    """A mask of this device's shard of the result: true at the positions of a dim from `start` on."""
    shape, whole_size = at.shape(), at.op.results[0].shape[dim]  # the factor has the operand's size
    places = at.emit(aten.arange.default, shape[dim], dtype=torch.int64)
    begins = [begin for begin, _ in spans(whole_size, at.axes(factor))]
    places = at.emit(aten.add.Tensor, places, at.pick(factor, begins))
    mask = at.emit(aten.ge.Scalar, places, start)
    view = [shape[dim] if d == dim else 1 for d in range(len(shape))]
    return at.emit(aten.reshape.default, mask, view)


def slice_scatter(op: Op) -> Rule:
    """The rule of slice_scatter, which replaces x[start:end:step]: devices of a sharded dim read their neighbours."""
    dim, start, end, step = bounds(op, 2)

    def local(at: LocalOp) -> Any:
        if not cut_dims(at, rule):
            return at.same()
        if step == 1:
            return at.window(0)
        (f,), rows = rule.results[0][dim], at.window(0)  # those for this shard, in order
        begins = [begin - start for begin, _ in spans(op.results[0].shape[dim], at.axes(f))]
        places = at.emit(aten.arange.default, at.shape()[dim], dtype=torch.int64)
        places = at.emit(aten.add.Tensor, places, at.pick(f, begins))
        row = at.emit(aten.floor_divide.default, places, step)
        replaced = at.emit(aten.eq.Tensor, at.emit(aten.mul.Tensor, row, step), places)
        for inside in ((aten.ge.Scalar, 0), (aten.lt.Scalar, op.operands[1].shape[dim])):
            replaced = at.emit(aten.logical_and.default, replaced, at.emit(inside[0], row, inside[1]))
        own = at.emit(aten.sub.Tensor, row, at.pick(f, [-(-begin // step) for begin in begins]))
        own = at.emit(aten.clamp.default, own, 0, at.shape_of(rows)[dim] - 1)
        view = [n if d == dim else 1 for d, n in enumerate(at.shape())]
        spread = at.emit(aten.index_select.default, rows, dim, own)
        return at.emit(aten.where.self, at.emit(aten.reshape.default, replaced, view), spread, at.inputs[0])

    rule = same_dims(op, [dim], Kind.PERMUTE, (0, 1), local=local)
    if step != 1:
        return with_windows(rule, [Window(1, dim, 2, dim, first=-start, scale=step)], moving=True)
    kept = [Window(0, dim, 2, dim, within=within) for within in ((0, start), (end, op.results[0].shape[dim]))]
    return with_windows(rule, [*kept, Window(1, dim, 2, dim, first=-start, within=(start, end))], moving=True)


def triangle(op: Op) -> Rule:
    """The rule of tril and triu: a device takes the part of the diagonal that crosses its shard."""
    factors = Factors()
    dims = factors.dims(op.operands[0].shape)
    diagonal = op.args[1] if len(op.args) > 1 else op.kwargs.get("diagonal", 0)

    def local(at: LocalOp) -> Any:
        row, column = (at.offset(f) for (f,) in dims[-2:]) if all(dims[-2:]) else (0, 0)
        if row == 0 and column == 0:
            return at.same()
        moved = at.emit(diagonal_in_shard, diagonal, row, column)
        return at.emit(op.target, at.inputs[0], moved)

    if not all(dims[-2:]):
        return whole(op, [-1, -2])
    return factors.rule([dims], [dims], additive=(0,), local=local)


def diagonal_in_shard(diagonal: int, row: int, column: int) -> int:
    """The index of a diagonal relative to a shard that starts at `row` and `column`."""
    return diagonal + row - column


def diagonal(op: Op) -> Rule:
    """The rule of diagonal(x, 0, dim1, dim2) of dims of one size: over a sharded one, each device has its part.

    If the other one is sharded, the result is a sum, to which a device adds the elements that it has.
    """
    first, second = (d % op.operands[0].rank for d in (*op.args[2:4], *(0, 1)[len(op.args[2:4]) :]))
    return replace(_diagonal_along(op, first, second), others=(_diagonal_along(op, second, first),))


def _diagonal_along(op: Op, along: int, across: int) -> Rule:
    """The rule by which the diagonal is sharded as the dim `along` is, and summed over shards of `across`."""
    x, factors = op.operands[0], Factors()
    summed = Kind.WHOLE if x.dtype == torch.bool else Kind.REDUCE
    dims = factors.dims(x.shape, summed, only=[across])
    rest = [d for d in range(x.rank) if d not in (along, across)]

    def local(at: LocalOp) -> Any:
        crossed = [(f, d) for d in (along, across) for f in dims[d]]
        if not any(at.axes(f) for f, _ in crossed):
            return at.same()
        places = []
        for f, d in crossed:
            place = at.emit(aten.arange.default, at.size(f), dtype=torch.int64)
            place = at.emit(aten.add.Tensor, place, at.offset(f))
            places.append(at.emit(aten.reshape.default, place, [-1 if e == d else 1 for e in range(x.rank)]))
        node = at.emit(aten.masked_fill.Scalar, at.inputs[0], at.emit(aten.ne.Tensor, *places), 0)
        node = at.emit(aten.sum.dim_IntList, node, [across], True, dtype=x.dtype)
        return at.emit(aten.squeeze.dim, at.emit(aten.permute.default, node, [*rest, along, across]), -1)

    out = (*(dims[d] for d in rest), dims[along])
    return factors.rule([dims], [out], additive=(0,), local=local, guarded=dims[across])


OPS: Table = {
    aten.slice: view_entry(slice_rule, strides.of_slice),
    aten.narrow: view_entry(slice_rule, strides.same),
    aten.split: view_entry(split, strides.same),
    aten.split_with_sizes: view_entry(split, strides.same),
    aten.select: view_entry(select, strides.by_torch(aten.select.int)),
    aten.unbind: view_entry(unbind, strides.by_torch(aten.unbind.int)),
    aten.slice_scatter: Entry(slice_scatter),
    aten.cat: Entry(cat, canonical=without_empty),
    aten.constant_pad_nd: Entry(pad),
    aten.flip: Entry(flip, canonical=without_ones),
    aten.roll: Entry(roll, inlined=True, recorded=by.roll),
    aten.tril: Entry(triangle),
    aten.triu: Entry(triangle),
    aten.diagonal: Entry(diagonal, view=strides.by_torch(aten.diagonal.default), recorded=by.diagonal),
    aten.diagonal_scatter: Entry(recorded=by.diagonal_scatter),
    aten.diagonal_backward: Entry(recorded=by.diagonal_backward),
}
