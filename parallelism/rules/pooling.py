"""Rules of pooling over windows and of unfolding them, forward and backward.

A device with a shard of a spatial dim first gets its neighbours' parts of the windows at the shard's ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.rules import strides
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule, whole
from tpshard.parallelism.rules.shape import view_entry
from tpshard.parallelism.rules.windows import Sliding, per_rank, per_spatial_dim

aten = torch.ops.aten


class Pooling:
    """The factors of pooling `x[... spatial] -> out[... spatial]` over the last `rank` dims.

    geometry: kernel, stride, padding and dilation. plain: whether spatial dims may be sharded.
    """

    def __init__(self, x: Value, out: Value, rank: int, geometry: Sequence[Any], plain: bool = True):
        kernel = per_spatial_dim(geometry[0], rank)
        stride = per_spatial_dim(geometry[1], rank, kernel)
        padding, dilation = per_spatial_dim(geometry[2], rank, 0), per_spatial_dim(geometry[3], rank)
        self.lead = x.rank - rank
        self.factors = Factors()
        before = self.factors.dims(x.shape[: self.lead])
        self.sliding = Sliding(
            self.factors, x.shape[self.lead :], out.shape[self.lead :], kernel, stride, padding, dilation,
            Kind.PERMUTE if plain else Kind.WHOLE, self.lead,
        )  # fmt: skip
        self.x: tuple[Dim, ...] = (*before, *self.sliding.read)
        self.out: tuple[Dim, ...] = (*before, *self.sliding.reader)

    def window(self, at: LocalOp, x: Sequence[int], out: Sequence[int]) -> list[int]:
        """The local shape of a device's window."""
        return [*x[: self.lead], *self.sliding.window(at, x[self.lead :], out[self.lead :])]

    def convert_indices(
        self, at: LocalOp, index: Any, read: int, source: Sequence[int], target: Sequence[int], sign: int
    ) -> Any:
        """Converts indices into a device's window to indices into the whole plane (`sign` 1), or back (-1).

        source, target: the spatial sizes before and after. read: the tensor that is read through windows.
        """
        total = None
        for d, f in enumerate(self.sliding.factors):
            place = at.emit(aten.floor_divide.default, index, math.prod(source[d + 1 :]))
            place = at.emit(aten.remainder.Scalar, place, source[d])
            if f is not None and at.axes(f):
                place = at.emit(aten.add.Tensor if sign > 0 else aten.sub.Tensor, place, at.begin(f, read))
                place = at.emit(aten.clamp.default, place, 0, target[d] - 1)
            place = at.emit(aten.mul.Tensor, place, math.prod(target[d + 1 :]))
            total = place if total is None else at.emit(aten.add.Tensor, total, place)
        return total


def max_pool(op: Op, rank: int) -> Rule:
    """The rule of max_pool_with_indices(x, kernel, stride, padding, dilation, ceil_mode) over `rank` spatial dims."""
    (x,), out = op.operands, op.results[0]
    geometry = (*op.args[1:], *(None,) * 4)[:4]
    pool = Pooling(x, out, rank, geometry, x.dtype.is_floating_point)
    ceil = op.args[5] if len(op.args) > 5 else False

    def local(at: LocalOp) -> Any:
        sliding = pool.sliding
        if not any(sliding.cut(at)):
            return at.same()
        node, kernel, dilation = at.window(0), *(per_spatial_dim(geometry[i], rank) for i in (0, 3))
        value, index = at.several(op.target, node, kernel, sliding.stride, sliding.padding_of(at), dilation, ceil)
        window = at.shape_of(node)[pool.lead :]
        return [value, pool.convert_indices(at, index, 0, window, x.shape[pool.lead :], 1)]

    windows = pool.sliding.windows(0, 1, -torch.inf)
    return pool.factors.rule([pool.x], [pool.out, pool.out], local=local, windows=windows)


def max_pool_backward(op: Op, rank: int) -> Rule:
    """The rule of max_pool_with_indices_backward(grad, x, kernel, stride, padding, dilation, ceil_mode, indices)."""
    grad, x, _ = op.operands
    pool = Pooling(x, grad, rank, op.args[2:6])

    def local(at: LocalOp) -> Any:
        if not any(pool.sliding.cut(at)):
            return at.same()
        shape = pool.window(at, at.operand_shape(1), at.operand_shape(0))
        like = at.emit(aten.new_empty.default, at.inputs[1], shape)
        indices = pool.convert_indices(at, at.inputs[2], 3, x.shape[pool.lead :], shape[pool.lead :], -1)
        rest = (*op.args[2:4], pool.sliding.padding_of(at), *op.args[5:7], indices)
        return at.fold(at.emit(op.target, at.inputs[0], like, *rest), 3, 0)

    return pool.factors.rule(
        [pool.out, pool.x, pool.out], [pool.x], local=local, windows=pool.sliding.windows(3, 0),
        fills=((0, 0.0), (2, 0.0)),
    )  # fmt: skip


def average_pool(op: Op, rank: int) -> Rule:
    """The rule of avg_pool(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor) over `rank` dims."""
    (x,), (out,) = op.operands, op.results
    pool = Pooling(x, out, rank, (*(*op.args[1:], *(None,) * 3)[:3], 1), x.dtype.is_floating_point)

    def local(at: LocalOp) -> Any:
        if not any(pool.sliding.cut(at)):
            return at.same()
        at.inputs[0] = at.window(0)
        return at.with_args(*op.args[:2], pool.sliding.stride, pool.sliding.padding_of(at), *op.args[4:])

    windows = pool.sliding.windows(0, 1, 0.0)
    return pool.factors.rule([pool.x], [pool.out], additive=(0,), local=local, windows=windows)


def average_pool_backward(op: Op, rank: int) -> Rule:
    """The rule of avg_pool_backward(grad, x, kernel, stride, padding, ceil_mode, count_include_pad, divisor)."""
    grad, x = op.operands
    pool = Pooling(x, grad, rank, (*op.args[2:5], 1))

    def local(at: LocalOp) -> Any:
        if not any(pool.sliding.cut(at)):
            return at.same()
        shape = pool.window(at, at.operand_shape(1), at.operand_shape(0))
        like = at.emit(aten.new_empty.default, at.inputs[1], shape)
        rest = (*op.args[2:4], pool.sliding.padding_of(at), *op.args[5:])
        return at.fold(at.emit(op.target, at.inputs[0], like, *rest), 2, 0)

    return pool.factors.rule(
        [pool.out, pool.x], [pool.x], additive=(0,), local=local, windows=pool.sliding.windows(2, 0),
        fills=((0, 0.0),),
    )  # fmt: skip


def _unequal(x: Tensor, args: Sequence[Any], rank: int) -> tuple[list[Any], Any, torch.dtype] | None:
    """The arguments kernel, stride, padding, ceil_mode, count_include_pad and divisor of average pooling over `rank`
    dims, the pooling op, and the dtype to add up in; None if all windows have one divisor."""
    full = [*args, *(None, [], [0], False, True, None)[len(args) :]]
    equal = full[5] or (not full[3] and (full[4] or not any(per_spatial_dim(full[2], rank, 0))))
    op = {2: aten.avg_pool2d, 3: aten.avg_pool3d}[rank].default
    return None if equal or not x.is_floating_point() else (full, op, torch.promote_types(x.dtype, torch.float32))


def _divisors(sizes: Sequence[int], counts: Sequence[int], args: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """The number of elements of each window of average pooling, [counts]; args: as of `_unequal`."""
    rank = len(sizes)
    kernel, padding = per_spatial_dim(args[0], rank), per_spatial_dim(args[2], rank, 0)
    stride = per_spatial_dim(args[1], rank, kernel)
    total = torch.ones([1] * rank, dtype=dtype)
    for d, (n, m, k, s, p) in enumerate(zip(sizes, counts, kernel, stride, padding)):
        first = torch.arange(m) * s - p
        size = (first + k).clamp(max=n + p) - first if args[4] else (first + k).clamp(max=n) - first.clamp(min=0)
        total = total * size.to(dtype).view(-1, *[1] * (rank - 1 - d))
    return total


def average(x: Tensor, *args: Any, rank: int) -> Tensor:
    """Computes avg_pool as sums of windows divided by their sizes, where these differ, as at an image's edges."""
    unequal = _unequal(x, args, rank)
    if unequal is None:
        return NotImplemented
    full, op, dtype = unequal
    sums = op(x.to(dtype), *full[:5], 1)
    average: Tensor = (sums / _divisors(x.shape[-rank:], sums.shape[-rank:], full, dtype)).to(x.dtype)
    return average


def average_backward(grad: Tensor, x: Tensor, *args: Any, rank: int) -> Tensor:
    """Computes avg_pool_backward as that of sums of windows, from the gradients of averages divided by their sizes."""
    unequal = _unequal(x, args, rank)
    if unequal is None:
        return NotImplemented
    full, _, dtype = unequal
    back = {2: aten.avg_pool2d_backward, 3: aten.avg_pool3d_backward}[rank].default
    each = grad.to(dtype) / _divisors(x.shape[-rank:], grad.shape[-rank:], full, dtype)
    gradient: Tensor = back(each, x.to(dtype), *full[:5], 1).to(x.dtype)
    return gradient


class Unfolding:
    """The factors of unfolding `x[..., n, ...] -> out[..., positions, ..., size]`; a window's elements are whole."""

    def __init__(self, x: Value, out: Value, dim: int, size: int, step: int):
        self.factors, self.dim = Factors(), dim % max(x.rank, 1)
        d = self.dim
        before, behind = (self.factors.dims(shape) for shape in (x.shape[:d], x.shape[d + 1 :]))
        self.sliding = Sliding(self.factors, x.shape[d : d + 1], out.shape[d : d + 1], [size], [step], [0], [1], lead=d)
        self.x: tuple[Dim, ...] = (*before, *self.sliding.read, *behind)
        element = self.factors.dims([size], Kind.WHOLE)
        self.out: tuple[Dim, ...] = (*before, *self.sliding.reader, *behind, *element)


def unfold(op: Op) -> Rule:
    """The rule of unfold(x, dim, size, step)."""
    (x,), (out,) = op.operands, op.results
    if x.rank == 0:
        return whole(op)
    way = Unfolding(x, out, *op.args[1:])

    def local(at: LocalOp) -> Any:
        at.inputs[0] = at.window(0)
        return at.same()

    return way.factors.rule([way.x], [way.out], additive=(0,), local=local, windows=way.sliding.windows(0, 1))


def unfold_backward(op: Op) -> Rule:
    """The rule of unfold_backward(gradient, sizes, dim, size, step), which adds up windows that overlap."""
    (grad,), (x,) = op.operands, op.results
    if x.rank == 0:
        return whole(op)
    way = Unfolding(x, grad, *op.args[2:])

    def local(at: LocalOp) -> Any:
        shape = list(at.shape())
        if any(way.sliding.cut(at)):
            positions = at.operand_shape(0)[way.dim]
            (shape[way.dim],) = way.sliding.window(at, [shape[way.dim]], [positions])
        return at.fold(at.emit(op.target, at.inputs[0], shape, *op.args[2:]), 1, 0)

    return way.factors.rule(
        [way.out], [way.x], additive=(0,), local=local, windows=way.sliding.windows(1, 0), fills=((0, 0.0),)
    )


APART = (0, 1, 4, 5, 2, 3)
"""The order of dims that takes windows [n, c, positions, kernel] to columns [n, c, kernel, positions], and back."""


def window_counts(
    size: Sequence[int], kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> list[int]:
    """The number of windows along each spatial dim of images of `size`."""
    along = zip(size, kernel, dilation, padding, stride)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, d, p, s in along]


def windows_of(x: Any, *geometry: Sequence[int]) -> Any:
    """The windows [n, c, positions, positions, kernel, kernel] of images, an op of the global graph alone.

    `im2col` merges these dims, and a sharding of rows could not pass that. geometry: kernel, dilation, padding, stride.
    """
    columns = aten.im2col.default(x, *geometry)
    return columns.view(*x.shape[:2], *geometry[0], *window_counts(x.shape[2:], *geometry)).permute(APART)


def sum_of_windows(windows: Any, size: Sequence[int], *geometry: Sequence[int]) -> Any:
    """The images of `size` to which windows add up, as in `col2im`: the transpose of `windows_of`."""
    return aten.col2im.default(windows.permute(APART).flatten(4, 5).flatten(1, 3), size, *geometry)


def _image_and_windows(image: Value, windows: Value, geometry: Sequence[Any]) -> tuple[Factors, Sliding, list[Any]]:
    """The factors of images and of their windows, and the dims of both. geometry: as of `windows_of`."""
    kernel, dilation, padding, stride = geometry
    factors = Factors()
    lead, element = factors.dims(image.shape[:2]), factors.dims(kernel, Kind.WHOLE)
    sliding = Sliding(factors, image.shape[2:], windows.shape[2:4], kernel, stride, padding, dilation)
    return factors, sliding, [(*lead, *sliding.read), (*lead, *sliding.reader, *element)]


def columns(op: Op) -> Rule:
    """The rule of `windows_of`."""
    (x,), (out,) = op.operands, op.results
    kernel, dilation, _, stride = op.args[1:]
    factors, sliding, (image, windows) = _image_and_windows(x, out, op.args[1:])

    def local(at: LocalOp) -> Any:
        n, c, *counts = at.shape()[:4]
        node = at.emit(aten.im2col.default, at.window(0), kernel, dilation, sliding.padding_of(at), stride)
        node = at.emit(aten.reshape.default, node, [n, c, *kernel, *counts])
        return at.emit(aten.permute.default, node, list(APART))

    return factors.rule([image], [windows], additive=(0,), local=local, windows=sliding.windows(0, 1, 0.0))


def image(op: Op) -> Rule:
    """The rule of `sum_of_windows`."""
    (x,), (out,) = op.operands, op.results
    kernel, dilation, _, stride = op.args[2:]
    factors, sliding, (image, windows) = _image_and_windows(out, x, op.args[2:])

    def local(at: LocalOp) -> Any:
        n, c, *counts = at.operand_shape(0)[:4]
        size = sliding.window(at, at.shape()[2:], counts)
        node = at.emit(aten.permute.default, at.inputs[0], list(APART))
        node = at.emit(aten.reshape.default, node, [n, c * math.prod(kernel), math.prod(counts)])
        node = at.emit(aten.col2im.default, node, size, kernel, dilation, sliding.padding_of(at), stride)
        return at.fold(node, 1, 0)

    return factors.rule(
        [windows], [image], additive=(0,), local=local, windows=sliding.windows(1, 0), fills=((0, 0.0),)
    )


def of_rank(rule: Callable[..., Rule], rank: int, decomposition: Callable[..., Any] | None = None) -> Entry:
    """The entry of pooling over `rank` spatial dims; decomposition: how calls that it supports are recorded."""
    return Entry(
        partial(rule, rank=rank), recorded="itself" if decomposition is None else partial(decomposition, rank=rank)
    )


def _parts_of(x: Tensor, size: Sequence[int]) -> list[int] | None:
    """The window sizes of adaptive pooling, if all windows are equal; else None."""
    into = x.shape[x.dim() - len(size) :]
    return None if any(n % m for n, m in zip(into, size)) else [n // m for n, m in zip(into, size)]


def _adaptive(of_two: Any, of_three: Any) -> Callable[..., Any]:
    """Returns a decomposition of adaptive pooling with equal windows by the pooling op over two or three dims."""

    def decomposition(x: Tensor, size: Sequence[int]) -> Any:
        kernel = _parts_of(x, size)
        return NotImplemented if kernel is None else {2: of_two, 3: of_three}[len(size)](x, kernel)

    return decomposition


adaptive_average = _adaptive(aten.avg_pool2d.default, aten.avg_pool3d.default)
adaptive_max = _adaptive(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)


def adaptive_average_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Computes _adaptive_avg_pool2d_backward with equal windows by avg_pool2d_backward."""
    kernel = _parts_of(x, grad.shape[2:])
    if x.dim() != 4 or kernel is None:
        return NotImplemented
    return aten.avg_pool2d_backward.default(grad, x, kernel, kernel, [0, 0], False, True, None)


def adaptive_max_backward(grad: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    """Computes adaptive_max_pool2d_backward with equal windows by max_pool2d_with_indices_backward."""
    kernel = _parts_of(x, grad.shape[2:])
    if x.dim() != 4 or kernel is None:
        return NotImplemented
    return aten.max_pool2d_with_indices_backward.default(grad, x, kernel, kernel, [0, 0], [1, 1], False, indices)


def in_a_batch(op: Any, rank: int) -> Callable[..., Tensor]:
    """Returns a decomposition of an op on a tensor without a batch by the op on a batch of one, of this rank."""

    def decomposition(x: Tensor, *args: Any) -> Tensor:
        return NotImplemented if x.dim() == rank else op(x.unsqueeze(0), *args).squeeze(0)

    return decomposition


OPS: Table = {
    aten.max_pool2d_with_indices: of_rank(max_pool, 2),
    aten.max_pool2d_with_indices_backward: of_rank(max_pool_backward, 2),
    aten.max_pool3d_with_indices: of_rank(max_pool, 3),
    aten.max_pool3d_with_indices_backward: of_rank(max_pool_backward, 3),
    aten.avg_pool2d: of_rank(average_pool, 2, average),
    aten.avg_pool2d_backward: of_rank(average_pool_backward, 2, average_backward),
    aten.avg_pool3d: of_rank(average_pool, 3, average),
    aten.avg_pool3d_backward: of_rank(average_pool_backward, 3, average_backward),
    aten.unfold: view_entry(unfold, strides.by_torch(aten.unfold.default)),
    aten.unfold_backward: Entry(unfold_backward),
    aten.im2col: Entry(recorded=in_a_batch(aten.im2col.default, 4), dense="all"),
    aten.col2im: Entry(recorded=in_a_batch(aten.col2im.default, 3), dense="all"),
    windows_of: Entry(columns),
    sum_of_windows: Entry(image),
    # with equal windows it is recorded as pooling; dense, since indices are read so
    **per_rank(
        "adaptive_max_pool{}d", "in->out,out", "out,in,out->in", dense="all",
        recorded=(adaptive_max, adaptive_max_backward),
    ),
}  # fmt: skip
