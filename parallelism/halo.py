"""Neighbours: what a device reads beyond its own part of a dim, and how it gets it (GSPMD, section 4.3).

A convolution, a slice, a shift read a window of the operand for every position of the result. Cut over devices, the
window of a part overhangs the operand's part; the overhang comes from the neighbours by `permute`, a hop for each
neighbour that it reaches into.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from tpshard.parallelism.lower import Emitter, pick
from tpshard.parallelism.mesh import Axes, size_of
from tpshard.parallelism.program import info
from tpshard.parallelism.rules.rule import Window
from tpshard.parallelism.sharding import even, local_size

aten = torch.ops.aten


class Halo(NamedTuple):
    """How every device of a dim finds its window. Counts are elements along the dim; tables go by place on the axes.

    The device lays [padding, left, its part, right, padding] side by side and cuts its window out of that.
    """

    part: int
    left: int
    right: int
    padding: tuple[int, int]
    starts: tuple[int, ...]
    """Where the window begins in what is laid side by side."""
    length: int
    begins: tuple[int, ...]
    """The same as a position of the whole operand, which may have no such position."""
    outside: bool
    """Whether a position of the result reads what the operand does not have."""

    def hops(self) -> Iterator[tuple[int, int]]:
        """(distance, width) of each permute: from the left, distances are positive."""
        for total, sign in ((self.left, 1), (self.right, -1)):
            for hop in range(1, -(-total // self.part) + 1):
                yield sign * hop, min(self.part, total - (hop - 1) * self.part)


def halo_of(operand: int, result: int, axes: Axes, window: Window) -> Halo | None:
    """The halo of a window, both dims (of sizes `operand` and `result`) cut over `axes`; None where parts do not lie
    side by side, or a window goes around the end of a padded dim."""
    # Only the outermost axis may leave padding, or there would be some between parts.
    adjoining = (even(local_size(n, axes[:1]), axes[1:]) for n in (operand, result))
    if not all(adjoining) or (window.cyclic and not even(operand, axes)):
        return None
    members, part, made = size_of(axes), local_size(operand, axes), local_size(result, axes)
    length = (made - 1) * window.stride + window.span
    begins = tuple(r * made * window.stride + window.first for r in range(members))
    left = right = 0
    outside, reading = False, []
    for r, begin in enumerate(begins):
        rows = min(made, result - r * made)
        end = begin + (rows - 1) * window.stride + window.span
        if not window.cyclic:
            outside = outside or (rows > 0 and (begin < 0 or end > operand))
            begin, end = max(begin, 0), min(end, operand)
        if rows > 0 and begin < end:
            reading.append(r)
            left, right = max(left, r * part - begin), max(right, end - (r + 1) * part)
    starts = [begin - r * part + left for r, begin in enumerate(begins)]
    read = [starts[r] for r in reading] or [0]
    # A device that reads nothing of the operand takes its window anywhere.
    starts = [min(max(start, min(read)), max(read)) for start in starts]
    padding = (max(0, -min(starts)), max(0, max(starts) + length - (left + part + right)))
    starts = [start + padding[0] for start in starts]
    return Halo(part, left, right, padding, tuple(starts), length, begins, outside)


def price(halo: Halo, part_bytes: int, latency: float) -> float:
    """Bytes that a device sends for its neighbours' windows, latencies included."""
    return sum(latency + part_bytes * width / halo.part for _, width in halo.hops())


def window(
    emitter: Emitter, node: fx.Node, dim: int, size: int, axes: Axes, halo: Halo, fill: float | None,
    why: dict[str, Any],
) -> fx.Node:  # fmt: skip
    """A device's window of an operand of which it holds `node`; `size` is the operand's along `dim`.

    Positions that the operand does not have hold `fill`; anything where that is None.
    """
    pieces = {0: node}
    for hop, width in halo.hops():
        strip = _narrow(emitter, node, dim, halo.part - width if hop > 0 else 0, width)
        pieces[-hop] = shift(emitter, strip, axes, hop, why)
    node = _cat(emitter, [pieces[place] for place in sorted(pieces)], dim)
    node = _pad(emitter, node, dim, *halo.padding)
    if len(set(halo.starts)) == 1:
        node = _narrow(emitter, node, dim, halo.starts[0], halo.length)
    else:
        node = _narrow(emitter, node, dim, emitter.ranked_number(pick, axes, halo.starts), halo.length)
    if fill is None or not halo.outside:
        return node
    outside = _outside(emitter, node, dim, size, axes, halo)
    return emitter.move(aten.masked_fill.Scalar, node, _shape(node), outside, fill)


def fold(
    emitter: Emitter, node: fx.Node, dim: int, size: int, axes: Axes, halo: Halo, why: dict[str, Any]
) -> fx.Node:  # fmt: skip
    """Transpose of `window`: of a gradient of the window the gradient of the device's part.

    What belongs to neighbours is sent to them and added there.
    """
    if halo.outside:
        outside = _outside(emitter, node, dim, size, axes, halo)
        node = emitter.move(aten.masked_fill.Scalar, node, _shape(node), outside, 0)
    total = halo.left + halo.part + halo.right + sum(halo.padding)
    starts: Any = halo.starts[0]
    rest: Any = total - halo.length - halo.starts[0]
    if len(set(halo.starts)) > 1:
        starts = emitter.ranked_number(pick, axes, halo.starts)
        rest = emitter.ranked_number(pick, axes, tuple(total - halo.length - start for start in halo.starts))
    node = _pad(emitter, node, dim, starts, rest, total)
    first = halo.padding[0] + halo.left
    own = _narrow(emitter, node, dim, first, halo.part)
    for hop, width in halo.hops():
        at = first - (hop - 1) * halo.part - width if hop > 0 else first - hop * halo.part
        came = shift(emitter, _narrow(emitter, node, dim, at, width), axes, -hop, why)
        missing = halo.part - width
        came = _pad(emitter, came, dim, *((missing, 0) if hop > 0 else (0, missing)))
        own = emitter.move(aten.add.Tensor, own, _shape(own), came)
    return own


def mirror(emitter: Emitter, node: fx.Node, dim: int, axes: Axes, why: dict[str, Any]) -> fx.Node:
    """A device's part of a flipped dim, which the axes cut evenly."""
    members = size_of(axes)
    came = emitter.send(node, axes, [members - 1 - i for i in range(members)], why)
    return emitter.move(aten.flip.default, came, _shape(came), [dim])


def shift(emitter: Emitter, node: fx.Node, axes: Axes, hop: int, why: dict[str, Any]) -> fx.Node:
    """What the device `hop` places before this one along the axes holds; the first follow the last."""
    members = size_of(axes)
    return emitter.send(node, axes, [(i + hop) % members for i in range(members)], why)


def _outside(emitter: Emitter, node: fx.Node, dim: int, size: int, axes: Axes, halo: Halo) -> fx.Node:
    """Mask of the window's positions that an operand of `size` does not have."""
    spec = (halo.length,)
    begin = emitter.ranked_number(pick, axes, halo.begins)
    places = emitter.number(aten.arange.default, spec, torch.int64, halo.length)
    places = emitter.number(aten.add.Tensor, spec, torch.int64, places, begin)
    before = emitter.number(aten.lt.Scalar, spec, torch.bool, places, 0)
    beyond = emitter.number(aten.ge.Scalar, spec, torch.bool, places, size)
    mask = emitter.number(aten.logical_or.default, spec, torch.bool, before, beyond)
    rank = len(_shape(node))
    return emitter.reshape(mask, [halo.length if d == dim else 1 for d in range(rank)])


def _shape(node: fx.Node) -> tuple[int, ...]:
    return info(node).specs[0].shape


def _sized(node: fx.Node, dim: int, size: int) -> tuple[int, ...]:
    have = _shape(node)
    return (*have[:dim], size, *have[dim + 1 :])


def _narrow(emitter: Emitter, node: fx.Node, dim: int, start: Any, length: int) -> fx.Node:
    if start == 0 and _shape(node)[dim] == length:
        return node
    return emitter.move(aten.narrow.default, node, _sized(node, dim, length), dim, start, length)


def _pad(emitter: Emitter, node: fx.Node, dim: int, before: Any, after: Any, total: int | None = None) -> fx.Node:
    """Adds zeros; `total` is the length then, where the widths are numbers of the rank."""
    have = _shape(node)
    if before == after == 0:
        return node
    widths = [0, 0] * (len(have) - 1 - dim) + [before, after]
    size = have[dim] + before + after if total is None else total
    return emitter.move(aten.constant_pad_nd.default, node, _sized(node, dim, size), widths, 0)


def _cat(emitter: Emitter, nodes: Sequence[fx.Node], dim: int) -> fx.Node:
    if len(nodes) == 1:
        return nodes[0]
    shape = _sized(nodes[0], dim, sum(_shape(node)[dim] for node in nodes))
    return emitter.number(aten.cat.default, shape, info(nodes[0]).specs[0].dtype, list(nodes), dim)
