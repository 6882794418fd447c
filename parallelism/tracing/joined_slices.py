"""Slices of one sharded dim, and the sum of their gradients, as a split and a concatenation that exchange less.

A slice by itself exchanges its own runs of elements; those of a split or a concatenation share permutes (`runs`). Two
slices put together in turn, one of them negated, as rotary positions have them, are a roll, which exchanges once.
Graphs hold slices until they are partitioned, since other code recognizes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from tpshard.parallelism.graph import Op, Place, Ref, Value
from tpshard.parallelism.propagated import Shardings
from tpshard.parallelism.rules.pieces import bounds
from tpshard.parallelism.rules.table import rule_for
from tpshard.parallelism.sharding import Sharding

aten = torch.ops.aten


class _Slices(NamedTuple):
    """Slices that together are a dim: the slicing ops of each part (start, end), in order."""

    dim: int
    parts: dict[tuple[int, int], list[Op]]


class _Sum(NamedTuple):
    """A sum of pieces that together are a dim: the last addition, the ops that it stands for, and the paddings."""

    op: Op
    dim: int
    summed: list[Op]
    pads: list[Op]


class _Turn(NamedTuple):
    """A concatenation of the end of a dim and of its beginning, each with a sign."""

    op: Op
    source: Value
    dim: int
    ends: tuple[int, int]
    """The sizes of the end and of the beginning."""
    signs: tuple[int, int]


def join(shardings: Shardings) -> Shardings:
    """The shardings of a rewritten copy of the graph, which has the same results; as given where nothing is joined."""
    parts = _slices_to_join(shardings), _sums_to_join(shardings), _turns_to_join(shardings)
    if all(next(each, None) is None for each in parts):
        return shardings
    shardings = shardings.copy()
    _join_padded(shardings)
    _join_turns(shardings)
    _join_slices(shardings)
    return shardings


def _slices_to_join(shardings: Shardings) -> Iterator[_Slices]:
    """Yields slices that together are a sharded dim.

    The slices are sharded like their source along the dim, and belong to one module and one phase.
    """
    graph, of = shardings.graph, shardings.of
    for source in list(graph.values()):
        along: dict[tuple[int, Place], dict[tuple[int, int], list[Op]]] = {}
        for op in dict.fromkeys(source.users):
            if op.target is aten.slice.Tensor and bounds(op, 1)[3] == 1:
                dim, start, end, _ = bounds(op, 1)
                along.setdefault((dim, op.place), {}).setdefault((start, end), []).append(op)
        for (dim, _), parts in along.items():
            starts, ends = zip(*sorted(parts))
            ops = [op for each in parts.values() for op in each]
            axes = of[source].dims[dim]
            whole = (*starts, source.shape[dim]) == (0, *ends) and all(start < end for start, end in parts)
            if axes and len(parts) > 1 and whole and all(of[op.results[0]].dims[dim] == axes for op in ops):
                yield _Slices(dim, dict(sorted(parts.items())))


def _join_slices(shardings: Shardings) -> None:
    """Rewrites slices that together are a sharded dim to a split, whose results share what they exchange."""
    graph = shardings.graph
    joined: set[Op] = set()
    position = {op: i for i, op in enumerate(graph.ops)}
    for dim, parts in _slices_to_join(shardings):
        ops = [op for each in parts.values() for op in each]
        first = min(ops, key=position.__getitem__)
        results = [each[0].results[0] for each in parts.values()]
        for each, value in zip(parts.values(), results):
            for again in each[1:]:
                graph.replace(again.results[0], value)
        sizes = [end - start for start, end in parts]
        first.target, first.args, first.kwargs = aten.split_with_sizes.default, (Ref(0), sizes, dim), {}
        first.results = results
        for i, value in enumerate(results):
            value.producer, value.index = first, i
        shardings.rules[first] = rule_for(first)
        joined.update(op for op in ops if op is not first)
    graph.ops = [op for op in graph.ops if op not in joined]
    graph.refresh_users()


def _sums_to_join(shardings: Shardings) -> Iterator[_Sum]:
    """Yields sums of pieces padded with zeros, as slices' gradients are; the last ones first.

    Along a sharded dim they share what they exchange; along any other each padded piece would be a tensor of the
    whole size.
    """
    graph = shardings.graph
    joined: set[Op] = set()
    summands: dict[Op, list[Op]] = {}
    for op in graph.ops:
        if (found := _padded_summands(op, summands)) is not None:
            summands[op] = found
    for op in reversed(graph.ops):
        summed = [] if op in joined else summands.get(op, [])
        if len(summed) < 2:
            continue
        pads = sorted((pad for pad in summed if pad.target is aten.constant_pad_nd.default), key=_piece)
        (value,), dim = op.results, _piece(pads[0])[0]
        at = [_piece(pad)[1] for pad in pads] + [value.shape[dim]]
        starts = [0, *accumulate(pad.operands[0].shape[dim] for pad in pads)]
        one_dim = all(_piece(pad)[0] == dim and pad.place.phase == op.place.phase for pad in pads)
        if at != starts or not one_dim:
            continue
        joined.update(summed)
        yield _Sum(op, dim, summed, pads)


def _join_padded(shardings: Shardings) -> None:
    """Rewrites sums of pieces padded with zeros to a concatenation."""
    graph = shardings.graph
    joined: set[Op] = set()
    for op, dim, summed, pads in _sums_to_join(shardings):
        op.target, op.args, op.kwargs = aten.cat.default, ([Ref(i) for i in range(len(pads))], dim), {}
        op.operands = [pad.operands[0] for pad in pads]
        shardings.rules[op] = rule_for(op)
        joined.update(summed)
    graph.ops = [op for op in graph.ops if op not in joined]
    graph.refresh_users()


def _turns_to_join(shardings: Shardings) -> Iterator[_Turn]:
    """Yields cat([-x[k:], x[:k]]), with any signs, along a sharded dim; nothing else reads the slices.

    They may be results of a split too, as `a, b = x.chunk(2, -1)` has them.
    """
    for op in shardings.graph.ops:
        if op.target is not aten.cat.default or len(op.operands) != 2:
            continue
        values, signs = zip(*(_without_sign(value, op) for value in op.operands))
        pieces = [_bounds_of(value) for value in values if value is not None]
        if len(pieces) < 2 or pieces[0] is None or pieces[1] is None:
            continue
        (dim, k, end, step), (other, start, stop, by) = pieces[0], pieces[1]
        (source, beside), result = (value.producer.operands[0] for value in values), op.results[0]
        along = (op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)) % result.rank
        turned = (start, stop, end, step, by) == (0, k, source.shape[dim], 1, 1) and dim == other == along
        axes = [shardings.of[value].dims[dim] for value in (source, result)]
        if source is beside and turned and 0 < k < end and axes[0] and axes[0] == axes[1]:
            yield _Turn(op, source, dim, (end - k, k), signs)


def _join_turns(shardings: Shardings) -> None:
    """Rewrites concatenations of slices in turn to a roll, times a constant with the signs where there are some."""
    graph = shardings.graph
    for op, source, dim, ends, signs in list(_turns_to_join(shardings)):
        result, args = op.results[0], (Ref(0), [-ends[1]], [dim])
        if signs == (1, 1):
            op.target, op.args, op.kwargs, op.operands = aten.roll.default, args, {}, [source]
            shardings.rules[op] = rule_for(op)
            continue
        rolled = Value(f"{op.name}.roll", result.shape, result.dtype)
        roll = Op(rolled.name, aten.roll.default, args, {}, [source], [rolled], op.place)
        rolled.producer = roll
        sign = torch.cat([torch.full((n,), one, dtype=result.dtype) for n, one in zip(ends, signs)])
        sign = sign.view(-1, *[1] * (result.rank - 1 - dim))
        constant = Value(f"{op.name}.signs", tuple(sign.shape), sign.dtype)
        graph.constants[constant.name.replace(".", "_")] = constant, sign
        op.target, op.args, op.kwargs, op.operands = aten.mul.Tensor, (Ref(0), Ref(1)), {}, [rolled, constant]
        graph.ops.insert(graph.ops.index(op), roll)
        shardings.of |= {rolled: shardings.of[result], constant: Sharding.unknown(sign.dim())}
        shardings.rules |= {each: rule_for(each) for each in (roll, op)}
    graph.refresh_users()
    graph.drop_dead()


def _bounds_of(value: Value) -> tuple[int, int, int, int] | None:
    """The dim, start, end and step of a slice or of a split's result; None for other values."""
    op = value.producer
    if op is None or op.target is aten.slice.Tensor:
        return None if op is None else bounds(op, 1)
    if op.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        return None
    dim = (op.args[2] if len(op.args) > 2 else op.kwargs.get("dim", 0)) % value.rank
    start = sum(result.shape[dim] for result in op.results[: value.index])
    return dim, start, start + value.shape[dim], 1


def _without_sign(value: Value, reader: Op) -> tuple[Value | None, int]:
    """A value, or of a negated one the operand of the negation, and the sign; None if others read it too."""
    if value.users != [reader]:
        return None, 1
    if value.producer is not None and value.producer.target is aten.neg.default:
        inner, sign = _without_sign(value.producer.operands[0], value.producer)
        return inner, -sign
    return value, 1


def _padded_summands(op: Op, before: Mapping[Op, list[Op]]) -> list[Op] | None:
    """The paddings with zeros along one dim, and the additions, of which an addition is the sum; None for other ops.

    Nothing else reads them. before: the same for the additions before it.
    """
    if op.target is not aten.add.Tensor or op.kwargs or len(op.operands) != 2 or len(op.args) != 2:
        return None
    out: list[Op] = []
    for value in op.operands:
        maker = value.producer
        if maker is None or value.users != [op] or value.shape != op.results[0].shape:
            return None
        if maker.target is aten.constant_pad_nd.default and maker.operands[0].dtype == op.results[0].dtype:
            if any(maker.args[2:]) or any(maker.kwargs.values()) or _piece(maker)[0] < 0:
                return None
        elif maker not in before:
            return None
        out += [maker, *before.get(maker, ())]
    return out


def _piece(pad: Op) -> tuple[int, int]:
    """The only dim that a padding changes and the number of elements before it, or -1 if there is no such dim."""
    value, widths = pad.operands[0], pad.args[1]
    changed = [i // 2 for i in range(0, len(widths), 2) if widths[i] or widths[i + 1]]
    return (value.rank - 1 - changed[0], widths[2 * changed[0]]) if len(changed) == 1 and min(widths) >= 0 else (-1, 0)
