"""Rules of resizing images by whole ratios with interpolation: a position of the result reads its neighbours.

Kernels clamp at the ends of an image. A device's window extends beyond its shard. Where the image ends there, the
window repeats the last rows, and the results at the window's own ends are cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.letters import rule_of
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule, Window
from tpshard.parallelism.rules.windows import SPATIAL, with_local_size

aten = torch.ops.aten


class Resizing:
    """The factors of resizing `x[n c spatial] -> out[n c (spatial ratio)]`.

    reach: the number of neighbours on each side that a position reads.
    """

    def __init__(self, x: Sequence[int], out: Sequence[int], reach: int):
        self.x, self.reach, self.factors = x, reach, Factors()
        lead = self.factors.dims(x[:2])
        self.ratios = [after // before for before, after in zip(x[2:], out[2:])]
        self.spatial = [self.factors.new(n, Kind.PERMUTE) if n > 1 else None for n in x[2:]]
        each: list[Dim] = [() if f is None else (f,) for f in self.spatial]
        inner = [(self.factors.new(ratio, Kind.WHOLE),) if ratio > 1 else () for ratio in self.ratios]
        self.small: tuple[Dim, ...] = (*lead, *each)
        self.large: tuple[Dim, ...] = (*lead, *(a + b for a, b in zip(each, inner)))

    def windows(self, read: int, reader: int) -> tuple[tuple[int, Window], ...]:
        """The window of each spatial dim through which tensor number `reader` reads tensor number `read`."""
        return tuple(
            (f, Window(read, d, reader, d, -self.reach, span=2 * self.reach + 1, scale=ratio))
            for d, (f, ratio) in enumerate(zip(self.spatial, self.ratios), 2) if f is not None
        )  # fmt: skip

    def cut(self, at: LocalOp) -> list[tuple[int, int, int]]:
        """The sharded spatial dims: (dim, factor, ratio) of each."""
        every = enumerate(zip(self.spatial, self.ratios), 2)
        return [(d, f, ratio) for d, (f, ratio) in every if f is not None and at.axes(f)]

    def inside(self, at: LocalOp, d: int, f: int, read: int, length: int) -> Any:
        """The position to read for each position of a device's window: itself, or the nearest inside the image."""
        begin = at.begin(f, read)
        place = at.emit(aten.add.Tensor, at.emit(aten.arange.default, length), begin)
        place = at.emit(aten.sub.Tensor, at.emit(aten.clamp.default, place, 0, self.x[d] - 1), begin)
        return at.emit(aten.clamp.default, place, 0, length - 1)


def _has_whole_ratios(x: Sequence[int], out: Sequence[int], corners: bool, scales: Sequence[float | None]) -> bool:
    """Whether all positions are interpolated alike: ratios are whole, and positions are measured from edges."""
    if corners or any(after % before for before, after in zip(x, out)):
        return False
    return all(scale is None or scale == after // before for scale, before, after in zip(scales, x, out))


def resize(op: Op, reach: int) -> Rule:
    """The rule of upsample(x, size, align_corners, scales...): spatial dims may be sharded if ratios are whole."""
    (x,), (out,) = op.operands, op.results
    if not _has_whole_ratios(x.shape[2:], out.shape[2:], op.args[2], op.args[3:]):
        before, after = SPATIAL[x.rank - 2]
        return rule_of(op, f"...{before}->...{after}", linear="0")
    parts = Resizing(x.shape, out.shape, reach)

    def local(at: LocalOp) -> Any:
        cut = parts.cut(at)
        if not cut:
            return at.same()
        node = at.window(0)
        for d, f, _ in cut:
            node = at.emit(aten.index_select.default, node, d, parts.inside(at, d, f, 0, at.shape_of(node)[d]))
        size = [n * ratio for n, ratio in zip(at.shape_of(node)[2:], parts.ratios)]
        node = at.emit(op.target, node, size, *op.args[2:])
        for d, _, ratio in cut:
            node = at.emit(aten.narrow.default, node, d, reach * ratio, at.shape()[d])
        return node

    return parts.factors.rule([parts.small], [parts.large], additive=(0,), windows=parts.windows(0, 1), local=local)


def resize_backward(op: Op, reach: int) -> Rule:
    """The rule of upsample_backward(grad, size, input size, align_corners, scales...), as that of `resize`."""
    (grad,), (x,) = op.operands, op.results
    if not _has_whole_ratios(x.shape[2:], grad.shape[2:], op.args[3], op.args[4:]):
        before, after = SPATIAL[x.rank - 2]
        return rule_of(op, f"...{after}->...{before}", local=with_local_size(2), linear="0")
    parts = Resizing(x.shape, grad.shape, reach)

    def local(at: LocalOp) -> Any:
        cut = parts.cut(at)
        node, size = at.inputs[0], list(at.shape())
        for d, _, ratio in cut:
            size[d] += 2 * reach
            widths = [0, 0] * (len(size) - 1 - d) + [reach * ratio] * 2
            node = at.emit(aten.constant_pad_nd.default, node, widths, 0)
        node = at.emit(op.target, node, list(at.shape_of(node)[2:]), size, *op.args[3:])
        for d, f, _ in cut:
            zeros = at.emit(aten.zeros_like.default, node)
            node = at.emit(aten.index_add.default, zeros, d, parts.inside(at, d, f, 1, size[d]), node)
        return at.fold(node, 1, 0) if cut else node

    windows = parts.windows(1, 0)
    return parts.factors.rule(
        [parts.large], [parts.small], additive=(0,), windows=windows, fills=((0, 0.0),), local=local
    )  # fmt: skip


OPS: Table = {
    aten.upsample_linear1d: Entry(partial(resize, reach=1)),
    aten.upsample_bilinear2d: Entry(partial(resize, reach=1)),
    aten.upsample_trilinear3d: Entry(partial(resize, reach=1)),
    aten.upsample_bicubic2d: Entry(partial(resize, reach=2)),
    aten.upsample_linear1d_backward: Entry(partial(resize_backward, reach=1)),
    aten.upsample_bilinear2d_backward: Entry(partial(resize_backward, reach=1)),
    aten.upsample_trilinear3d_backward: Entry(partial(resize_backward, reach=1)),
    aten.upsample_bicubic2d_backward: Entry(partial(resize_backward, reach=2)),
}
