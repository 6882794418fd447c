"""Halo exchange: how a device gets elements beyond its shard of a dim from its neighbours (GSPMD, section 4.3).

A convolution, a slice or a shift reads a window of the operand for every position of the result. With a sharded dim,
the window of a shard overhangs it; the overhang is sent by `permute`, one hop for each neighbour that it reaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from tpshard.parallelism import factors
from tpshard.parallelism.factors import Cut
from tpshard.parallelism.graph import Op
from tpshard.parallelism.mesh import Axes, size_of
from tpshard.parallelism.node_info import resized, shape_of
from tpshard.parallelism.resharding.lower import Emitter, pick
from tpshard.parallelism.resharding.runs import Read, RunPlan, runs_of
from tpshard.parallelism.rules.rule import Rule, Window
from tpshard.parallelism.sharding import even, local_bytes, local_size, spans

aten = torch.ops.aten


class Halo(NamedTuple):
    """The plan by which every device of a sharded dim gets its window.

    A device concatenates [padding, left, its shard, right, padding] and slices its window from that. Counts are
    elements along the dim; tables have an entry per position on the axes.
    """

    part: int
    left: int
    right: int
    padding: tuple[int, int]
    starts: tuple[int, ...]
    """Where the window begins in the concatenation, per device."""
    length: int
    begins: tuple[int, ...]
    """Where the window begins in the whole operand, per device; possibly outside of it."""
    outside: bool
    """Whether a window has positions outside of the operand."""

    def hops(self) -> Iterator[tuple[int, int]]:
        """Yields the distance and the width of each permute; positive distances are from the left."""
        for total, sign in ((self.left, 1), (self.right, -1)):
            for hop in range(1, -(-total // self.part) + 1):
                yield sign * hop, min(self.part, total - (hop - 1) * self.part)

    def price(self, element_bytes: float, latency: float) -> float:
        """The bytes that a device sends, plus the latency of each permute in bytes."""
        return sum(latency + element_bytes * width for _, width in self.hops())


def halo_of(operand: int, result: int, axes: Axes, window: Window) -> Halo | None:
    """The halo of a window, with both dims (of sizes `operand` and `result`) sharded over `axes`.

    None where the shards are not adjacent.
    """
    # Only the outermost axis may leave padding; otherwise padding would separate shards.
    adjoining = (even(local_size(n, axes[:1]), axes[1:]) for n in (operand, result))
    if not all(adjoining):
        return None
    members, part, written = size_of(axes), local_size(operand, axes), local_size(result, axes)
    length = window.length(result, written, members)
    begins = tuple(window.begin(r * written) for r in range(members))
    left = right = 0
    outside, reading = False, []
    for r, begin in enumerate(begins):
        rows = min(written, result - r * written)
        end = window.begin(r * written + rows - 1) + window.span
        outside = outside or (rows > 0 and (begin < 0 or end > operand))
        begin, end = max(begin, 0), min(end, operand)
        if rows > 0 and begin < end:
            reading.append(r)
            left, right = max(left, r * part - begin), max(right, end - (r + 1) * part)
    starts = [begin - r * part + left for r, begin in enumerate(begins)]
    read = [starts[r] for r in reading] or [0]
    # A device that reads nothing of the operand may take its window anywhere.
    starts = [min(max(start, min(read)), max(read)) for start in starts]
    padding = (max(0, -min(starts)), max(0, max(starts) + length - (left + part + right)))
    starts = [start + padding[0] for start in starts]
    return Halo(part, left, right, padding, tuple(starts), length, begins, outside)


def plan_of(op: Op, rule: Rule, factor: int, axes: Axes) -> RunPlan:
    """The plan of an op whose rule only moves elements along a factor sharded over `axes`; unread results get none."""
    tensors, first = (*op.operands, *op.results), len(op.operands)
    unread = {i for i, value in enumerate(tensors) if not value.users and any(r.users for r in op.results)}
    reads = []
    for f, w in rule.windows:
        if f == factor:
            length = 0 if w.reader in unread else tensors[w.reader].shape[w.reader_dim]
            size = tensors[w.read].shape[w.dim]
            more = w.stride, w.within, w.mirrored, w.scale
            reads.append(Read(w.read, size, w.reader - first, length, w.first, (1, 1), *more))
    return runs_of(tuple(reads), axes)


def price(op: Op, rule: Rule, choice: Mapping[int, Cut], latency: float) -> float:
    """The cost of what an op's windows read of other devices, in bytes: those that a device sends, and latencies."""
    total = 0.0
    moved: set[int] = set()
    for f, window in rule.windows:
        if f not in choice or f in moved:
            continue
        moved |= {f} if rule.moving else set()
        axes, value = choice[f].axes, (*op.operands, *op.results)[window.read]
        layout = factors.layout_of(rule.tensors[window.read], choice, rule.sizes)
        part = local_bytes(value.shape, layout, value.dtype.itemsize)
        plan = plan_of(op, rule, f, axes) if rule.moving else halo_in(op, axes, window)
        if plan is not None:
            total += plan.price(part / max(local_size(value.shape[window.dim], axes), 1), latency)
    return total


def keep_strided(emitter: Emitter, node: fx.Node, size: int, axes: Axes, window: Window) -> fx.Node:
    """Emits what a window with a stride reads of a device's shard of a dim of `size`, as `runs.Read` expects it."""
    if window.stride == 1:
        return node
    part, dim = shape_of(node)[window.dim], window.dim
    starts = [(window.first - begin) % window.stride for begin, _ in spans(size, axes)]
    kept = -(-part // window.stride)
    read = (kept - 1) * window.stride + 1
    node = emitter.pad(node, dim, 0, max(0, max(starts) + read - part))
    node = emitter.narrow(node, dim, emitter.pick(axes, starts), read)
    return emitter.move(aten.slice.Tensor, node, resized(node, dim, kept), dim, 0, read, window.stride)


def halo_in(op: Op, axes: Axes, window: Window) -> Halo | None:
    """The halo of a window of an op, with its dims sharded over `axes`; None where it has none."""
    shapes = [value.shape for value in (*op.operands, *op.results)]
    return halo_of(
        shapes[window.read][window.dim], shapes[window.reader][window.reader_dim] // window.scale, axes, window
    )


def window(
    emitter: Emitter, node: fx.Node, dim: int, size: int, axes: Axes, halo: Halo, fill: float | None,
    why: dict[str, Any],
) -> fx.Node:  # fmt: skip
    """Emits the halo exchange that extends a device's shard `node` to its window.

    size: the operand's size along `dim`. Positions outside of the operand hold `fill`, or anything if that is None.
    Elements of a node that were received before, as those that a convolution read are for its weight's gradient, are
    not sent again.
    """
    pieces, read = {0: node}, emitter.windows.get(node, node)
    for hop, width in halo.hops():
        key = read, dim, axes, hop, width
        if key not in emitter.received:
            strip = emitter.narrow(node, dim, halo.part - width if hop > 0 else 0, width)
            emitter.received[key] = shift(emitter, strip, axes, hop, why)
        pieces[-hop] = emitter.received[key]
    node = emitter.concatenate([pieces[place] for place in sorted(pieces)], dim)
    node = emitter.pad(node, dim, *halo.padding)
    node = emitter.narrow(node, dim, emitter.pick(axes, halo.starts), halo.length)
    if fill is not None and halo.outside:
        outside = _outside_mask(emitter, node, dim, size, axes, halo)
        node = emitter.move(aten.masked_fill.Scalar, node, shape_of(node), outside, fill)
    if node is not pieces[0]:
        emitter.windows[node] = read, dim, axes, halo, fill
    return node


def fold(
    emitter: Emitter, node: fx.Node, dim: int, size: int, axes: Axes, halo: Halo, why: dict[str, Any]
) -> fx.Node:  # fmt: skip
    """Emits the transpose of `window`: turns the gradient of a device's window into that of its shard.

    Parts that belong to neighbours are sent to them and added there.
    """
    if halo.outside:
        outside = _outside_mask(emitter, node, dim, size, axes, halo)
        node = emitter.move(aten.masked_fill.Scalar, node, shape_of(node), outside, 0)
    total = halo.left + halo.part + halo.right + sum(halo.padding)
    rest = [total - halo.length - start for start in halo.starts]
    node = emitter.pad(node, dim, emitter.pick(axes, halo.starts), emitter.pick(axes, rest), total)
    first = halo.padding[0] + halo.left
    own = emitter.narrow(node, dim, first, halo.part)
    for hop, width in halo.hops():
        at = first - (hop - 1) * halo.part - width if hop > 0 else first - hop * halo.part
        received = shift(emitter, emitter.narrow(node, dim, at, width), axes, -hop, why)
        missing = halo.part - width
        received = emitter.pad(received, dim, *((missing, 0) if hop > 0 else (0, missing)))
        own = emitter.move(aten.add.Tensor, own, shape_of(own), received)
    return own


def shift(emitter: Emitter, node: fx.Node, axes: Axes, hop: int, why: dict[str, Any]) -> fx.Node:
    """Emits a permute: a device gets the shard of the one `hop` places before it along the axes, cyclically."""
    members = size_of(axes)
    return emitter.send(node, axes, [(i + hop) % members for i in range(members)], why)


def _outside_mask(emitter: Emitter, node: fx.Node, dim: int, size: int, axes: Axes, halo: Halo) -> fx.Node:
    """A mask of the window's positions outside of an operand of `size`."""
    spec = (halo.length,)
    begin = emitter.ranked_number(pick, axes, halo.begins)
    places = emitter.number(aten.arange.default, spec, torch.int64, halo.length)
    places = emitter.number(aten.add.Tensor, spec, torch.int64, places, begin)
    before = emitter.number(aten.lt.Scalar, spec, torch.bool, places, 0)
    beyond = emitter.number(aten.ge.Scalar, spec, torch.bool, places, size)
    mask = emitter.number(aten.logical_or.default, spec, torch.bool, before, beyond)
    rank = len(shape_of(node))
    return emitter.reshape(mask, [halo.length if d == dim else 1 for d in range(rank)])
