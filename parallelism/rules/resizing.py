"""Rules of resizing images with interpolation, by any ratio: a position of the result reads a few neighbours.

A device first gets the rows that its part of the result reads. Kernels of torch measure positions from the end of what
they get, so that a sharded dim is interpolated here, by weighted sums of rows, with antialiasing as one product with a
matrix of weights; torch's kernel resizes the other dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.pooling import adaptive_average, adaptive_average_backward
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule, Window

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

    def resized(self, at: LocalOp, f: int, d: int, node: Any, written: int) -> Any:
        """The `written` results of a device's window along dim d."""
        total: Any = None
        for place, weight in self.rows(at, f, d, 0, written, at.shape_of(node)[d], node):
            part = at.emit(aten.index_select.default, node, d, place)
            part = part if weight is None else at.emit(aten.mul.Tensor, part, weight)
            total = part if total is None else at.emit(aten.add.Tensor, total, part)
        return total

    def spread(self, at: LocalOp, f: int, d: int, node: Any, length: int, read: int = 1) -> Any:
        """The gradient of a device's window of `length` rows of tensor number `read` from that of its results: the
        transpose of `resized`."""
        shape = [length if e == d else n for e, n in enumerate(at.shape_of(node))]
        total = at.emit(aten.new_zeros.default, node, shape)
        for place, weight in self.rows(at, f, d, read, at.shape_of(node)[d], length, node):
            part = node if weight is None else at.emit(aten.mul.Tensor, node, weight)
            total = at.emit(aten.index_add.default, total, d, place, part)
        return total

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


class Smooth(Way):
    """How positions of one dim are read with antialiasing: by a kernel of `taps` rows, as wide as a position of a
    smaller result. The weights of a device's rows are a matrix, which is computed by position."""

    def __init__(self, n: int, m: int, taps: int, corners: bool, scale: float | None, centred: bool):
        super().__init__(n, m, taps, corners, scale, centred)
        self.wide = max(self.scale, 1.0)

    def window(self, f: int, d: int, read: int, reader: int) -> tuple[int, Window]:
        centre = (torch.arange(self.m, dtype=self.dtype) + 0.5) * self.scale
        reach = self.taps / 2 * self.wide
        first = (centre - reach + 0.5).long().clamp(min=0, max=self.n - 1)
        end = (centre + reach + 0.5).long().clamp(max=self.n)
        span = max(1, int((end - first).max()))
        return f, Window(read, d, reader, d, span=span, places=tuple(first.tolist()), fill=0.0)

    def resized(self, at: LocalOp, f: int, d: int, node: Any, written: int) -> Any:
        return self._times(at, d, node, self._matrix(at, f, 0, written, at.shape_of(node)[d], at.dtype_of(node)))

    def spread(self, at: LocalOp, f: int, d: int, node: Any, length: int, read: int = 1) -> Any:
        matrix = self._matrix(at, f, read, at.shape_of(node)[d], length, at.dtype_of(node))
        return self._times(at, d, node, at.emit(aten.permute.default, matrix, [1, 0]))

    def _times(self, at: LocalOp, d: int, node: Any, matrix: Any) -> Any:
        """The product of a matrix with a tensor along its dim d."""
        last = at.emit(aten.linear.default, at.emit(aten.transpose.int, node, d, -1), matrix)
        return at.emit(aten.transpose.int, last, d, -1)

    def _matrix(self, at: LocalOp, f: int, read: int, written: int, length: int, dtype: torch.dtype) -> Any:
        """The weights [written, length] with which a device's results read its window of tensor number `read`."""
        centre = at.emit(aten.add.Tensor, at.emit(aten.arange.default, written), at.offset(f))
        centre = at.emit(aten.add.Tensor, at.emit(aten._to_copy.default, centre, dtype=self.dtype), 0.5)
        centre = at.emit(aten.mul.Tensor, centre, self.scale)
        row = at.emit(aten.add.Tensor, at.emit(aten.arange.default, length), at.begin(f, read))
        away = at.emit(aten.sub.Tensor, at.emit(aten.add.Tensor, row, 0.5), at.emit(aten.unsqueeze.default, centre, 1))
        weight = self._kernel(at, at.emit(aten.abs.default, at.emit(aten.div.Tensor, away, self.wide)))
        for outside in (at.emit(aten.lt.Scalar, row, 0), at.emit(aten.ge.Scalar, row, self.n)):
            weight = at.emit(aten.masked_fill.Scalar, weight, outside, 0)
        total = at.emit(aten.sum.dim_IntList, weight, [1], True)
        total = at.emit(aten.masked_fill.Scalar, total, at.emit(aten.eq.Scalar, total, 0), 1)  # behind the last result
        return at.emit(aten._to_copy.default, at.emit(aten.div.Tensor, weight, total), dtype=dtype)

    def _kernel(self, at: LocalOp, away: Any) -> Any:
        """The linear or cubic kernel at distances from its centre."""
        if self.taps == 2:
            return at.emit(aten.clamp.default, at.emit(aten.rsub.Scalar, away, 1), 0)
        near, far = self.cubic(at, away, 0, -0.5), self.cubic(at, at.emit(aten.sub.Tensor, away, 1), 1, -0.5)
        far = at.emit(aten.masked_fill.Scalar, far, at.emit(aten.ge.Scalar, away, 2), 0)
        return at.emit(aten.where.self, at.emit(aten.lt.Scalar, away, 1), near, far)


class Means(Smooth):
    """How positions of one dim are read by adaptive average pooling: each is the mean of a window of `n / m` rows, of
    which the first and the last may be read in part and count whole."""

    def window(self, f: int, d: int, read: int, reader: int) -> tuple[int, Window]:
        bounds = [(o * self.n // self.m, -((o + 1) * -self.n // self.m)) for o in range(self.m)]
        span = max(end - first for first, end in bounds)
        return f, Window(read, d, reader, d, span=span, places=tuple(first for first, _ in bounds), fill=0.0)

    def _matrix(self, at: LocalOp, f: int, read: int, written: int, length: int, dtype: torch.dtype) -> Any:
        position = at.emit(aten.add.Tensor, at.emit(aten.arange.default, written), at.offset(f))
        first = at.emit(aten.floor_divide.default, at.emit(aten.mul.Tensor, position, self.n), self.m)
        behind = at.emit(aten.mul.Tensor, at.emit(aten.add.Tensor, position, 1), self.n)
        end = at.emit(aten.floor_divide.default, at.emit(aten.add.Tensor, behind, self.m - 1), self.m)
        row = at.emit(aten.add.Tensor, at.emit(aten.arange.default, length), at.begin(f, read))
        first, end = (at.emit(aten.unsqueeze.default, edge, 1) for edge in (first, end))
        inside = at.emit(
            aten.logical_and.default, at.emit(aten.ge.Tensor, row, first), at.emit(aten.lt.Tensor, row, end)
        )
        size = at.emit(aten._to_copy.default, at.emit(aten.sub.Tensor, end, first), dtype=dtype)
        return at.emit(aten.div.Tensor, at.emit(aten._to_copy.default, inside, dtype=dtype), size)


class Resizing:
    """The factors of resizing `x[n c spatial] -> out[n c spatial]`, and the way of each spatial dim.

    rest: the op's arguments behind the sizes: whether corners are aligned (with several taps), and scales.
    """

    def __init__(
        self, small: Value, large: Value, taps: int, centred: bool, rest: Sequence[Any], kind: type[Way] = Way
    ):  # fmt: skip
        self.factors, self.taps, (x, out) = Factors(), taps, (small.shape, large.shape)
        corners, *scales = rest if taps > 1 else (False, *rest)
        lead = self.factors.dims(x[:2])
        self.ways = [
            kind(n, m, taps, corners, scale, centred)
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


def resize(op: Op, taps: int, centred: bool = False, kind: type[Way] = Way) -> Rule:
    """The rule of upsample(x, size, [align_corners,] scales...)."""
    (x,), (out,) = op.operands, op.results
    parts = Resizing(x, out, taps, centred, op.args[2:], kind)

    def local(at: LocalOp) -> Any:
        cut = parts.cut(at)
        if not cut:
            return at.with_args(op.args[0], list(at.shape()[2:]), *op.args[2:])
        node = _in_fp32(at, at.window(0))
        for d, f, way in cut:
            node = way.resized(at, f, d, node, at.shape()[d])
        if len(cut) < len(parts.ways):
            node = at.emit(op.target, node, list(at.shape()[2:]), *parts.others(at, op.args[2:]))
        return at.emit(aten._to_copy.default, node, dtype=x.dtype) if at.dtype_of(node) != x.dtype else node

    return parts.factors.rule([parts.small], [parts.large], additive=(0,), windows=parts.windows(0, 1), local=local)


def resize_backward(op: Op, taps: int, centred: bool = False, kind: type[Way] = Way) -> Rule:
    """The rule of upsample_backward(grad, size, input size, [align_corners,] scales...), as that of `resize`."""
    (grad,), (x,) = op.operands, op.results
    parts = Resizing(x, grad, taps, centred, op.args[3:], kind)
    windows = parts.windows(1, 0)

    def local(at: LocalOp) -> Any:
        cut, node, size = parts.cut(at), _in_fp32(at, at.inputs[0]), list(at.shape())
        if not cut:
            return at.with_args(op.args[0], list(at.operand_shape(0)[2:]), size, *op.args[3:])
        for d, f, way in cut:
            written = at.operand_shape(0)[d]
            (window,) = (w for g, w in windows if g == f)
            size[d] = window.length(way.m, written, at.members(f))
            node = way.spread(at, f, d, node, size[d])
        if len(cut) < len(parts.ways):
            node = at.emit(op.target, node, list(at.shape_of(node)[2:]), size, *parts.others(at, op.args[3:]))
        node = at.fold(node, 1, 0)
        return at.emit(aten._to_copy.default, node, dtype=x.dtype) if at.dtype_of(node) != x.dtype else node

    return parts.factors.rule(
        [parts.large], [parts.small], additive=(0,), windows=windows, fills=((0, 0.0),), local=local
    )  # fmt: skip


def adaptive(op: Op) -> Rule:
    """The rule of _adaptive_avg_pool2d(x, size), and of that over three dims, with windows that differ."""
    return resize(op, 1, kind=Means)


def adaptive_backward(op: Op) -> Rule:
    """The rule of _adaptive_avg_pool2d_backward(grad, x), of which x has only the shape."""
    grad, x = op.operands
    parts = Resizing(x, grad, 1, False, (), Means)
    windows = parts.windows(2, 0)

    def local(at: LocalOp) -> Any:
        cut, node = parts.cut(at), _in_fp32(at, at.inputs[0])
        if not cut:
            return at.same()
        size = list(at.shape())
        for d, f, way in cut:
            (window,) = (w for g, w in windows if g == f)
            size[d] = window.length(way.m, at.operand_shape(0)[d], at.members(f))
            node = way.spread(at, f, d, node, size[d], 2)
        if len(cut) < len(parts.ways):
            node = at.emit(op.target, node, at.emit(aten.new_empty.default, node, size))
        node = at.fold(node, 2, 0)
        return at.emit(aten._to_copy.default, node, dtype=x.dtype) if at.dtype_of(node) != x.dtype else node

    return parts.factors.rule(
        [parts.large, parts.small], [parts.small], additive=(0,), windows=windows, fills=((0, 0.0),), local=local
    )  # fmt: skip


def _both(
    name: str, taps: int, centred: bool = False, recorded: Sequence[Any] = ("itself", "itself"), kind: type[Way] = Way
) -> Table:  # fmt: skip
    """The entries of an op and of its backward op."""
    rules = [partial(rule, taps=taps, centred=centred, kind=kind) for rule in (resize, resize_backward)]
    ops = (getattr(aten, name), getattr(aten, f"{name}_backward"))
    return {op: Entry(rule, recorded=by_what) for op, rule, by_what in zip(ops, rules, recorded)}


def _ratios(small: Sequence[int], large: Sequence[int], scales: Sequence[float | None]) -> list[int] | None:
    """Returns how many times resizing repeats each position of each dim, or None if it is not one integer per dim."""
    if any(n % m for m, n in zip(small, large)):
        return None
    ratios = [n // m for m, n in zip(small, large)]
    return ratios if all(scale is None or scale == ratio for scale, ratio in zip(scales, ratios)) else None


def nearest(x: Tensor, size: Sequence[int], *scales: float | None) -> Tensor:
    """Computes upsample_nearest with integer ratios by repeating every position."""
    ratios = _ratios(x.shape[2:], size, scales)
    if ratios is None:
        return NotImplemented
    pairs = [m for n, ratio in zip(x.shape[2:], ratios) for m in (n, ratio)]
    singles = [m for n in x.shape[2:] for m in (n, 1)]
    return x.reshape(*x.shape[:2], *singles).expand(*x.shape[:2], *pairs).reshape(*x.shape[:2], *size)


def nearest_backward(grad: Tensor, size: Sequence[int], shape: Sequence[int], *scales: float | None) -> Tensor:
    """Computes upsample_nearest_backward with integer ratios by summing the copies of every position."""
    ratios = _ratios(shape[2:], size, scales)
    if ratios is None:
        return NotImplemented
    pairs = [m for n, ratio in zip(shape[2:], ratios) for m in (n, ratio)]
    return grad.reshape(*shape[:2], *pairs).sum([3 + 2 * d for d in range(len(ratios))])


NEAREST = (nearest, nearest_backward)
OPS: Table = {
    **_both("upsample_linear1d", 2),
    **_both("upsample_bilinear2d", 2),
    **_both("upsample_trilinear3d", 2),
    **_both("upsample_bicubic2d", 4),
    **{k: v for rank in (1, 2, 3) for k, v in _both(f"upsample_nearest{rank}d", 1, False, NEAREST).items()},
    **{k: v for rank in (1, 2, 3) for k, v in _both(f"_upsample_nearest_exact{rank}d", 1, True, NEAREST).items()},
    **_both("_upsample_bilinear2d_aa", 2, kind=Smooth),
    **{
        getattr(aten, f"_adaptive_avg_pool{rank}d{way}"): Entry(rule, recorded=by_what, dense="all")
        for rank in (2, 3)
        for way, rule, by_what in (
            ("", adaptive, adaptive_average),
            ("_backward", adaptive_backward, adaptive_average_backward),
        )
    },
    **_both("_upsample_bicubic2d_aa", 4, kind=Smooth),
}
