"""Rules of resizing images with interpolation, by any ratio: a position of the result reads a few neighbours.

A device first gets the rows that its part of the result reads. Kernels of torch measure positions from the end of what
they get, so that a sharded dim is interpolated here, by weighted sums of rows; torch's kernel resizes the other dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.rules import decompositions as by
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule, Window
from tpshard.parallelism.rules.windows import per_rank

aten = torch.ops.aten


class Way:
    """How positions of one dim of n are read for a result of m: position `o` is at `o * scale + shift` of the operand.

    taps: the rows that it reads: 1 (the one below), 2 (linear) or 4 (cubic). corners: whether the centres of the first
    and last elements are aligned, instead of their edges. scale: what the caller gave, if anything, instead of m / n.
    centred: of one tap, whether it is the row below the position's centre instead of its edge.
    """

    def __init__(self, n: int, m: int, taps: int, corners: bool, scale: float | None, centred: bool):
        self.n, self.m, self.taps = n, m, taps
        step = 1 / scale if scale else n / m
        if corners:
            step = (n - 1) / (m - 1) if m > 1 else 0.0
        self.dtype = torch.float32 if taps == 1 else torch.float64  # a row below is found as torch's kernels find it
        self.scale = float(torch.tensor(step, dtype=self.dtype))
        self.before = 0.0 if corners or (taps == 1 and not centred) else 0.5
        self.behind = self.before if taps > 1 else 0.0
        self.least = taps == 2 and not corners  # linear positions begin at 0, so that the first row is repeated

    def window(self, f: int, d: int, read: int, reader: int) -> tuple[int, Window]:
        """The window through which tensor number `reader` reads tensor number `read`."""
        place = (torch.arange(self.m, dtype=self.dtype) + self.before) * self.scale - self.behind
        rows = (place.clamp(min=0) if self.least else place).floor().long().clamp(max=self.n - 1)
        places = tuple((rows - int(self.taps == 4)).tolist())
        return f, Window(read, d, reader, d, span=self.taps, places=places)

    def rows(self, at: LocalOp, f: int, d: int, read: int, written: int, length: int, like: Any) -> Iterator[Any]:
        """Yields, for each tap, the places in a device's window that its `written` results read, and their weights in
        the dtype of `like`, which broadcast over it; None for the weight 1."""
        node = at.emit(aten.add.Tensor, at.emit(aten.arange.default, written), at.offset(f))
        node = at.emit(aten._to_copy.default, node, dtype=self.dtype)
        node = at.emit(aten.mul.Tensor, at.emit(aten.add.Tensor, node, self.before), self.scale)
        node = at.emit(aten.sub.Tensor, node, self.behind)
        node = at.emit(aten.clamp.default, node, 0) if self.least else node
        low = at.emit(aten.floor.default, node)
        past = at.emit(aten._to_copy.default, at.emit(aten.sub.Tensor, node, low), dtype=at.dtype_of(like))
        past = at.emit(aten.reshape.default, past, [-1, *[1] * (len(at.shape_of(like)) - 1 - d)])
        low = at.emit(aten._to_copy.default, low, dtype=torch.int64)
        for tap, weight in enumerate(self.weights(at, past)):
            place = at.emit(aten.add.Tensor, low, tap - int(self.taps == 4))
            place = at.emit(aten.sub.Tensor, at.emit(aten.clamp.default, place, 0, self.n - 1), at.begin(f, read))
            yield at.emit(aten.clamp.default, place, 0, length - 1), weight

    def weights(self, at: LocalOp, past: Any) -> list[Any]:
        """The weight of each tap of positions that are `past` the row below."""
        if self.taps == 1:
            return [None]
        rest = at.emit(aten.rsub.Scalar, past, 1)
        if self.taps == 2:
            return [rest, past]
        return [self.cubic(at, past, 1), self.cubic(at, past, 0), self.cubic(at, rest, 0), self.cubic(at, rest, 1)]

    def cubic(self, at: LocalOp, x: Any, more: int, a: float = -0.75) -> Any:
        """The cubic kernel (Keys 1981, with torch's a) at the distance x in [0, 1], or at x + 1 (`more`)."""
        if more:
            x = at.emit(aten.add.Tensor, x, 1)
        first, *middle, last = (a, -5 * a, 8 * a, -4 * a) if more else (a + 2, -a - 3, 0.0, 1.0)
        node = at.emit(aten.mul.Tensor, x, first)
        for number in middle:
            node = at.emit(aten.mul.Tensor, at.emit(aten.add.Tensor, node, number), x)
        return at.emit(aten.add.Tensor, node, last)


class Resizing:
    """The factors of resizing `x[n c spatial] -> out[n c spatial]`, and the way of each spatial dim.

    rest: the op's arguments behind the sizes: whether corners are aligned (with several taps), and scales.
    """

    def __init__(self, small: Value, large: Value, taps: int, centred: bool, rest: Sequence[Any]):
        self.factors, self.taps, (x, out) = Factors(), taps, (small.shape, large.shape)
        corners, *scales = rest if taps > 1 else (False, *rest)
        lead = self.factors.dims(x[:2])
        self.ways = [
            Way(n, m, taps, corners, scale, centred)
            for n, m, scale in zip(x[2:], out[2:], [*scales, *[None] * len(x)])
        ]  # fmt: skip
        weighed = taps == 1 or small.dtype.is_floating_point  # sums of integers' rows round otherwise
        self.spatial = [
            self.factors.new(way.m, Kind.PERMUTE) if weighed and min(way.n, way.m) > 1 else None for way in self.ways
        ]

        def dims(sizes: Sequence[int]) -> tuple[Dim, ...]:
            alone = [() if n == 1 else (self.factors.new(n, Kind.WHOLE),) for n in sizes[2:]]
            return (*lead, *(other if f is None else (f,) for f, other in zip(self.spatial, alone)))

        self.small, self.large = dims(x), dims(out)

    def windows(self, read: int, reader: int) -> tuple[tuple[int, Window], ...]:
        """The window of each spatial dim through which tensor number `reader` reads tensor number `read`."""
        every = enumerate(zip(self.spatial, self.ways), 2)
        return tuple(way.window(f, d, read, reader) for d, (f, way) in every if f is not None)

    def cut(self, at: LocalOp) -> list[tuple[int, int, Way]]:
        """The sharded spatial dims: (dim, factor, way) of each."""
        every = enumerate(zip(self.spatial, self.ways), 2)
        return [(d, f, way) for d, (f, way) in every if f is not None and at.axes(f)]

    def others(self, at: LocalOp, rest: Sequence[Any]) -> list[Any]:
        """The op's last arguments for a call in which the sharded dims keep their size."""
        aligned, scales = ([rest[0]], rest[1:]) if self.taps > 1 else ([], rest)
        sharded = {d for d, _, _ in self.cut(at)}
        return [*aligned, *(None if d in sharded else scale for d, scale in enumerate(scales, 2))]


def _in_fp32(at: LocalOp, node: Any) -> Any:
    """A node in the dtype in which torch's kernels add up rows: fp32 for narrower ones."""
    narrow = at.dtype_of(node) in (torch.float16, torch.bfloat16)
    return at.emit(aten._to_copy.default, node, dtype=torch.float32) if narrow else node


def resize(op: Op, taps: int, centred: bool = False) -> Rule:
    """The rule of upsample(x, size, [align_corners,] scales...)."""
    (x,), (out,) = op.operands, op.results
    parts = Resizing(x, out, taps, centred, op.args[2:])

    def local(at: LocalOp) -> Any:
        cut = parts.cut(at)
        if not cut:
            return at.with_args(op.args[0], list(at.shape()[2:]), *op.args[2:])
        node = _in_fp32(at, at.window(0))
        for d, f, way in cut:
            total: Any = None
            rows = way.rows(at, f, d, 0, at.shape()[d], at.shape_of(node)[d], node)
            for place, weight in rows:
                part = at.emit(aten.index_select.default, node, d, place)
                part = part if weight is None else at.emit(aten.mul.Tensor, part, weight)
                total = part if total is None else at.emit(aten.add.Tensor, total, part)
            node = total
        if len(cut) < len(parts.ways):
            node = at.emit(op.target, node, list(at.shape()[2:]), *parts.others(at, op.args[2:]))
        return at.emit(aten._to_copy.default, node, dtype=x.dtype) if at.dtype_of(node) != x.dtype else node

    return parts.factors.rule([parts.small], [parts.large], additive=(0,), windows=parts.windows(0, 1), local=local)


def resize_backward(op: Op, taps: int, centred: bool = False) -> Rule:
    """The rule of upsample_backward(grad, size, input size, [align_corners,] scales...), as that of `resize`."""
    (grad,), (x,) = op.operands, op.results
    parts = Resizing(x, grad, taps, centred, op.args[3:])
    windows = parts.windows(1, 0)

    def local(at: LocalOp) -> Any:
        cut, node, size = parts.cut(at), _in_fp32(at, at.inputs[0]), list(at.shape())
        if not cut:
            return at.with_args(op.args[0], list(at.operand_shape(0)[2:]), size, *op.args[3:])
        for d, f, way in cut:
            written = at.operand_shape(0)[d]
            (window,) = (w for g, w in windows if g == f)
            size[d] = window.length(way.m, written, at.members(f))
            shape = [size[d] if e == d else n for e, n in enumerate(at.shape_of(node))]
            total = at.emit(aten.new_zeros.default, node, shape)
            for place, weight in way.rows(at, f, d, 1, written, size[d], node):
                part = node if weight is None else at.emit(aten.mul.Tensor, node, weight)
                total = at.emit(aten.index_add.default, total, d, place, part)
            node = total
        if len(cut) < len(parts.ways):
            node = at.emit(op.target, node, list(at.shape_of(node)[2:]), size, *parts.others(at, op.args[3:]))
        node = at.fold(node, 1, 0)
        return at.emit(aten._to_copy.default, node, dtype=x.dtype) if at.dtype_of(node) != x.dtype else node

    return parts.factors.rule(
        [parts.large], [parts.small], additive=(0,), windows=windows, fills=((0, 0.0),), local=local
    )  # fmt: skip


def _both(name: str, taps: int, centred: bool = False, recorded: Sequence[Any] = ("itself", "itself")) -> Table:
    """The entries of an op and of its backward op."""
    rules = (partial(resize, taps=taps, centred=centred), partial(resize_backward, taps=taps, centred=centred))
    ops = (getattr(aten, name), getattr(aten, f"{name}_backward"))
    return {op: Entry(rule, recorded=by_what) for op, rule, by_what in zip(ops, rules, recorded)}


NEAREST = (by.nearest, by.nearest_backward)
OPS: Table = {
    **_both("upsample_linear1d", 2),
    **_both("upsample_bilinear2d", 2),
    **_both("upsample_trilinear3d", 2),
    **_both("upsample_bicubic2d", 4),
    **{k: v for rank in (1, 2, 3) for k, v in _both(f"upsample_nearest{rank}d", 1, False, NEAREST).items()},
    **{k: v for rank in (1, 2, 3) for k, v in _both(f"_upsample_nearest_exact{rank}d", 1, True, NEAREST).items()},
    **per_rank("_upsample_bilinear{}d_aa", "in->out", "out->in", linear="0", size=2),
    **per_rank("_upsample_bicubic{}d_aa", "in->out", "out->in", linear="0", size=2),
}
