"""Slices of one sharded dim, and the sum of their gradients, as a split and a concatenation that exchange less.

A slice by itself exchanges its own runs of elements; those of a split or a concatenation share permutes (`runs`).
Graphs hold slices until they are partitioned, since other code recognizes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from tpshard.parallelism.graph import Op, Place, Ref
from tpshard.parallelism.propagated import Shardings
from tpshard.parallelism.rules.pieces import bounds
from tpshard.parallelism.rules.table import rule_for

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


def join(shardings: Shardings) -> Shardings:
    """The shardings of a rewritten copy of the graph, which has the same results; as given where nothing is joined."""
    if next(_slices_to_join(shardings), None) is None and next(_sums_to_join(shardings), None) is None:
        return shardings
    shardings = shardings.copy()
    _join_slices(shardings)
    _join_padded(shardings)
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
    """Yields sums of pieces padded with zeros, as slices' gradients are, along a sharded dim; the last ones first."""
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
        if at != starts or not one_dim or not shardings.of[value].dims[dim]:
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
