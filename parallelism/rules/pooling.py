"""Rules of pooling over windows, forward and backward.

A device with a shard of a spatial dim first gets its neighbours' parts of the windows at the shard's ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.rules import decompositions as by
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.letters import letters
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule, product
from tpshard.parallelism.rules.windows import Sliding, per_spatial_dim

aten = torch.ops.aten
INDEX = torch.int64


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
        shape, total = at.shape_of(index), None
        for d, f in enumerate(self.sliding.factors):

            def emit(op: Any, *args: Any) -> Any:
                return at.emit(op, *args, shape=shape, dtype=INDEX)

            place = emit(aten.floor_divide.default, index, product(source[d + 1 :]))
            place = emit(aten.remainder.Scalar, place, source[d])
            if f is not None and at.axes(f):
                op = aten.add.Tensor if sign > 0 else aten.sub.Tensor
                place = emit(aten.clamp.default, emit(op, place, at.begin(f, read)), 0, target[d] - 1)
            place = emit(aten.mul.Tensor, place, product(target[d + 1 :]))
            total = place if total is None else emit(aten.add.Tensor, total, place)
        return total


def max_pool(rank: int) -> Callable[[Op], Rule]:
    """The rule of max_pool_with_indices(x, kernel, stride, padding, dilation, ceil_mode) over `rank` spatial dims."""

    def rule(op: Op) -> Rule:
        (x,), (out, _) = op.operands, op.results
        geometry = (*op.args[1:], *(None,) * 4)[:4]
        pool = Pooling(x, out, rank, geometry, x.dtype.is_floating_point)
        ceil = op.args[5] if len(op.args) > 5 else False

        def local(at: LocalOp) -> Any:
            if not any(pool.sliding.cut(at)):
                return at.same()
            node = at.window(0)
            sizes = pool.sliding
            kernel = per_spatial_dim(geometry[0], rank)
            baseed = at.several(
                op.target, node, kernel, sizes.stride, sizes.padding_of(at), per_spatial_dim(geometry[3], rank), ceil,
                like=[(at.shape(), out.dtype), (at.shape(), INDEX)],
            )  # fmt: skip
            window = at.shape_of(node)[pool.lead :]
            return [baseed[0], pool.convert_indices(at, baseed[1], 0, window, x.shape[pool.lead :], 1)]

        base = pool.factors.rule([pool.x], [pool.out, pool.out], local=local)
        return replace(base, windows=pool.sliding.windows(0, 1, -torch.inf))

    return rule


def max_pool_backward(rank: int) -> Callable[[Op], Rule]:
    """The rule of max_pool_with_indices_backward(grad, x, kernel, stride, padding, dilation, ceil_mode, indices)."""

    def rule(op: Op) -> Rule:
        grad, x, _ = op.operands
        pool = Pooling(x, grad, rank, op.args[2:6])

        def local(at: LocalOp) -> Any:
            if not any(pool.sliding.cut(at)):
                return at.same()
            shape = pool.window(at, at.operand_shape(1), at.operand_shape(0))
            like = at.emit(aten.new_empty.default, at.inputs[1], shape, shape=shape)
            indices = pool.convert_indices(at, at.inputs[2], 3, x.shape[pool.lead :], shape[pool.lead :], -1)
            gradient = at.emit(
                op.target, at.inputs[0], like, *op.args[2:4], pool.sliding.padding_of(at), *op.args[5:7], indices,
                shape=shape,
            )  # fmt: skip
            return at.fold(gradient, 3, 0)

        base = pool.factors.rule([pool.out, pool.x, pool.out], [pool.x], local=local)
        return replace(base, windows=pool.sliding.windows(3, 0), fills=((0, 0.0), (2, 0.0)))

    return rule


def _even(args: Sequence[Any], rank: int) -> bool:
    """Whether all windows of average pooling have one divisor; args: padding, ceil_mode, count_include_pad, divisor."""
    padding, ceil, count, divisor = (*args, *(None,) * 4)[:4]
    return bool(divisor) or (not ceil and (count is not False or not any(per_spatial_dim(padding, rank, 0))))


def average_pool(rank: int) -> Callable[[Op], Rule]:
    """The rule of avg_pool(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor) over `rank` dims."""

    def rule(op: Op) -> Rule:
        (x,), (out,) = op.operands, op.results
        geometry = (*op.args[1:], *(None,) * 3)[:3]
        pool = Pooling(x, out, rank, (*geometry, 1), _even(op.args[3:], rank))

        def local(at: LocalOp) -> Any:
            if not any(pool.sliding.cut(at)):
                return at.same()
            at.inputs[0] = at.window(0)
            return at.with_args(*op.args[:2], pool.sliding.stride, pool.sliding.padding_of(at), *op.args[4:])

        base = pool.factors.rule([pool.x], [pool.out], additive=(0,), local=local)
        return replace(base, windows=pool.sliding.windows(0, 1, 0.0))

    return rule


def average_pool_backward(rank: int) -> Callable[[Op], Rule]:
    """The rule of avg_pool_backward(grad, x, kernel, stride, padding, ceil_mode, count_include_pad, divisor)."""

    def rule(op: Op) -> Rule:
        grad, x = op.operands
        pool = Pooling(x, grad, rank, (*op.args[2:5], 1), _even(op.args[4:], rank))

        def local(at: LocalOp) -> Any:
            if not any(pool.sliding.cut(at)):
                return at.same()
            shape = pool.window(at, at.operand_shape(1), at.operand_shape(0))
            like = at.emit(aten.new_empty.default, at.inputs[1], shape, shape=shape)
            rest = (*op.args[2:4], pool.sliding.padding_of(at), *op.args[5:])
            return at.fold(at.emit(op.target, at.inputs[0], like, *rest, shape=shape), 2, 0)

        base = pool.factors.rule([pool.out, pool.x], [pool.x], additive=(0,), local=local)
        return replace(base, windows=pool.sliding.windows(2, 0), fills=((0, 0.0),))

    return rule


def _adaptive(name: str, spelled: str, back: str, recorded: tuple[Any, Any], linear: str = "") -> Table:
    """The entries of adaptive pooling, whose spatial dims are whole; with equal windows it is recorded as pooling."""
    table: Table = {}
    for rank, (before, after) in {2: ("HW", "YZ"), 3: ("DHW", "XYZ")}.items():
        for text, suffix, one in ((spelled, "", recorded[0]), (back, "_backward", recorded[1])):
            text = text.replace("out", f"...{after}").replace("in", f"...{before}")
            op = getattr(aten, f"{name}{rank}d{suffix}")
            table[op] = letters(text, linear=linear and "0", recorded=one, dense="all")  # indices are read densely
    return table


OPS: Table = {
    aten.max_pool2d_with_indices: Entry(max_pool(2)),
    aten.max_pool2d_with_indices_backward: Entry(max_pool_backward(2)),
    aten.max_pool3d_with_indices: Entry(max_pool(3)),
    aten.max_pool3d_with_indices_backward: Entry(max_pool_backward(3)),
    aten.avg_pool2d: Entry(average_pool(2)),
    aten.avg_pool2d_backward: Entry(average_pool_backward(2)),
    aten.avg_pool3d: Entry(average_pool(3)),
    aten.avg_pool3d_backward: Entry(average_pool_backward(3)),
    **_adaptive("_adaptive_avg_pool", "in->out", "out,in->in",
                (by.adaptive_average, by.adaptive_average_backward), linear="0"),
    **_adaptive("adaptive_max_pool", "in->out,out", "out,in,out->in",
                (by.adaptive_max, by.adaptive_max_backward)),
}  # fmt: skip
