"""The rules of convolution and padding.

A device with a shard of a spatial dim first receives a halo, its neighbours' parts of the windows at the shard's ends,
and then convolves. Padding needs whole spatial dims, except where it is recorded as parts put together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tpshard.parallelism.graph import Op, Ref, Value
from tpshard.parallelism.rules import decompositions as by
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.letters import letters
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule, Window

aten = torch.ops.aten


def per_spatial_dim(numbers: Any, rank: int, otherwise: Any = 1) -> list[int]:
    """Spreads a layer's argument over the spatial dims: it may be one number for all of them, or omitted."""
    values = [numbers] if isinstance(numbers, int) else list(numbers if numbers is not None else ())
    return list(otherwise) if not values and not isinstance(otherwise, int) else (values or [otherwise]) * (
        rank if len(values) < 2 else 1
    )  # fmt: skip


class Sliding:
    """The factors of the spatial dims of two tensors, of which one (`reader`) reads the other through windows.

    A dim whose size is 1 in either tensor is not sharded. lead: dims before the spatial ones.
    """

    def __init__(
        self, factors: Factors, read: Sequence[int], reader: Sequence[int], kernel: Sequence[int],
        stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], kind: Kind = Kind.PERMUTE,
        lead: int = 2,
    ):  # fmt: skip
        self.stride, self.padding, self.lead, self.kind = stride, padding, lead, kind
        self.spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel)]
        self.factors = [
            factors.new(positions, kind) if min(size, positions) > 1 else None for size, positions in zip(read, reader)
        ]  # fmt: skip
        whole = [
            [() if f is not None or n == 1 else (factors.new(n, Kind.WHOLE),) for f, n in zip(self.factors, sizes)]
            for sizes in (read, reader)
        ]
        self.read, self.reader = (
            tuple((f,) if f is not None else alone[d] for d, f in enumerate(self.factors)) for alone in whole
        )

    def windows(self, read: int, reader: int, fill: float | None = None) -> tuple[tuple[int, Window], ...]:
        """The window of each spatial dim through which tensor number `reader` reads tensor number `read`."""
        return tuple(
            (f, Window(read, dim, reader, dim, -self.padding[d], self.stride[d], self.spans[d], fill))
            for d, f in enumerate(self.factors) if f is not None and self.kind is not Kind.WHOLE
            for dim in (self.lead + d,)
        )  # fmt: skip

    def cut(self, at: LocalOp) -> list[bool]:
        """Whether each spatial dim is sharded."""
        return [f is not None and bool(at.axes(f)) for f in self.factors]

    def padding_of(self, at: LocalOp, padding: Sequence[int] | None = None) -> list[int]:
        """Returns the padding of a device's local call: 0 for a sharded dim, whose window includes the padding."""
        return [0 if cut else n for cut, n in zip(self.cut(at), padding or self.padding)]

    def window(self, at: LocalOp, read: Sequence[int], reader: Sequence[int]) -> list[int]:
        """The spatial sizes of a device's window, from the local sizes of the tensor read and of the reader."""
        return [
            (positions - 1) * step + span if cut else size
            for cut, size, positions, step, span in zip(self.cut(at), read, reader, self.stride, self.spans)
        ]


class Channels:
    """The factors of a convolution: batch n, groups g, channels per group i and o, and spatial dims.

    `x[n (g i) ...]`, `weight[(g o) i ...]` (transposed: `[(g i) o ...]`), `out[n (g o) ...]`. Along spatial dims one
    side reads the other through windows. geometry: stride, padding and dilation. summed: the weight's spatial dims
    are sharded with x's, instead of the result's, and the result is a partial sum.
    """

    def __init__(
        self, x: Value, weight: Value, out: Value, transposed: bool, groups: int, geometry: Sequence[Sequence[int]],
        kind: Kind = Kind.PERMUTE, summed: bool = False,
    ):  # fmt: skip
        self.factors = Factors()
        self.n = self.factors.new(x.shape[0])
        self.g = self.factors.new(groups)
        first = weight.shape[0] // groups
        i, o = (first, weight.shape[1]) if transposed else (weight.shape[1], first)
        self.i, self.o = self.factors.new(i), self.factors.new(o)
        rank = x.rank - 2
        read, reader = (out, x) if transposed else (x, out)
        stride, padding, dilation = (per_spatial_dim(numbers, rank) for numbers in geometry)
        sides: tuple[Value, Value] = (reader, weight)
        if summed:  # a position of the weight reads the element at that position of every window
            sides, stride, dilation, kind = (weight, reader), dilation, stride, Kind.REDUCE
        self.sliding = Sliding(
            self.factors, read.shape[2:], sides[0].shape[2:], sides[1].shape[2:], stride, padding, dilation, kind
        )
        whole = self.factors.dims(sides[1].shape[2:], Kind.WHOLE)
        kernel, reading = (self.sliding.reader, whole) if summed else (whole, self.sliding.reader)
        near, far = (reading, self.sliding.read) if transposed else (self.sliding.read, reading)
        a, b = (self.i, self.o) if transposed else (self.o, self.i)
        self.x: tuple[Dim, ...] = ((self.n,), (self.g, self.i), *near)
        self.out: tuple[Dim, ...] = ((self.n,), (self.g, self.o), *far)
        self.weight: tuple[Dim, ...] = ((self.g, a), (b,), *kernel)
        self.bias: tuple[Dim, ...] = ((self.g, self.o),)
        self.work = (self.n, self.g, self.i, self.o, *(f for f in self.sliding.factors if f is not None))


def convolution(op: Op) -> Rule:
    """The rule of convolution: batch, channels, groups and spatial dims may be sharded; input channels are summed.

    The op is convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups). Where the
    windows of the result's positions overlap by more than those of the weight's (a gradient of another weight), the
    weight is sharded with x. Patches that do not overlap are no such case, however large they are.
    """
    x, weight = op.operands[:2]
    strides, dilations = (per_spatial_dim(op.args[i], x.rank - 2) for i in (3, 5))
    sizes = zip(weight.shape[2:], op.results[0].shape[2:], strides, dilations)
    overlaps = [(d * (k - 1) + 1 - s, s * (n - 1) + 1 - d) for k, n, s, d in sizes if k > 1]
    if op.args[6] or not overlaps or any(result <= kernel for result, kernel in overlaps):
        return sliding_over(op)
    return replace(sliding_over(op, summed=True), others=(sliding_over(op),))


def sliding_over(op: Op, summed: bool = False) -> Rule:
    """The rule of a convolution with the result's spatial dims sharded, or (`summed`) the weight's."""
    x, weight = op.operands[:2]
    (out,) = op.results
    place = len(op.operands)
    transposed, more = op.args[6], per_spatial_dim(op.args[7], x.rank - 2)
    channels = Channels(x, weight, out, transposed, op.args[8], op.args[3:6], summed=summed)
    channels.factors.kinds[channels.i] = Kind.REDUCE
    sliding = channels.sliding

    def local(at: LocalOp) -> Any:
        bias = op.args[2]
        for f in (channels.i, *(sliding.factors if summed else ())):
            if isinstance(bias, Ref) and f is not None and at.axes(f):  # added only once to the partial sum
                at.inputs[2] = at.emit(aten.mul.Tensor, at.inputs[2], at.first(f))
        padding = sliding.padding_of(at)
        rest = (op.args[3], padding, op.args[5], transposed, sliding.padding_of(at, more), at.size(channels.g))
        if not transposed or not any(sliding.cut(at)):
            at.inputs[0] = at.window(0, 1 if summed else None)
            return at.with_args(*op.args[:3], *rest)
        result = at.fold(at.emit(op.target, *at.inputs[:2], None, *rest, work=True), place, 0)
        if not isinstance(bias, Ref):
            return result
        return at.emit(aten.add.Tensor, result, at.emit(aten.reshape.default, at.inputs[2], [-1, *[1] * (x.rank - 2)]))

    operands = [channels.x, channels.weight] + ([channels.bias] if len(op.operands) > 2 else [])
    flops = 2 * (x.numel if transposed else out.numel) * math.prod(weight.shape[1:])
    windows = sliding.windows(place, 0) if transposed else sliding.windows(0, 1 if summed else place, fill=0.0)
    return channels.factors.rule(
        operands, [channels.out], flops=flops, work=channels.work, local=local, windows=windows,
        fills=((0, 0.0),) if transposed else (),
    )  # fmt: skip


def convolution_backward(op: Op) -> Rule:
    """The rule of convolution_backward for the weight's gradient alone, which is summed over batch and spatial dims.

    Its output mask is [False, True, False]. The other gradients are convolutions and sums (`rules.decompositions`).
    """
    grad, x, weight = op.operands
    transposed = op.args[7]
    channels = Channels(x, weight, grad, transposed, op.args[9], op.args[4:7], Kind.REDUCE)
    channels.factors.kinds[channels.n] = Kind.REDUCE
    read, reader = (0, 1) if transposed else (1, 0)

    def local(at: LocalOp) -> Any:
        at.inputs[read] = at.window(read, reader)
        padding, more = (channels.sliding.padding_of(at, per_spatial_dim(op.args[i], x.rank - 2)) for i in (5, 8))
        return at.with_args(
            *op.args[:3], None, op.args[4], padding, *op.args[6:8], more, at.size(channels.g), op.args[10]
        )

    flops = 2 * (x.numel if transposed else grad.numel) * math.prod(weight.shape[1:])
    return channels.factors.rule(
        [channels.out, channels.x, channels.weight], [(), channels.weight, ()], flops=flops, work=channels.work,
        local=local, windows=channels.sliding.windows(read, reader, fill=0.0),
    )  # fmt: skip


SPATIAL = {1: ("W", "Z"), 2: ("HW", "YZ"), 3: ("DHW", "XYZ")}
"""The letters of the whole spatial dims of input and output, by their number."""


def per_rank(
    name: str, forward: str, backward: str = "", *, recorded: Sequence[Any] = ("itself", "itself"), **facts: Any
) -> Table:  # fmt: skip
    """The entries of ops with `{}` in their name for the number of spatial dims, and of their backward ops.

    In letters `in` and `out` are the spatial dims of input and output. recorded: how each of the two is recorded.
    """
    table: Table = {}
    for rank, (before, after) in SPATIAL.items():
        texts = [text.replace("out", f"...{after}").replace("in", f"...{before}") for text in (forward, backward)]
        op, back = (getattr(aten, name.format(rank) + suffix, None) for suffix in ("", "_backward"))
        if op is None or (backward and back is None):
            continue
        table[op] = letters(texts[0], recorded=recorded[0], **facts)
        if backward:
            table[back] = letters(texts[1], recorded=recorded[1], **facts)
    return table


Edge = Callable[[Tensor, int, int, bool], Tensor]
"""An `Edge` computes the padding of one side of a dim, from (tensor, dim, width, whether the side is the dim's end)."""


def pad_by(x: Tensor, padding: Sequence[int], edge: Edge) -> Tensor:
    """Pads the last dims on both sides with what `edge` computes; `padding` begins with the last dim, as in torch."""
    if min(padding) < 0:
        return NotImplemented
    for k in range(len(padding) // 2):
        d = x.dim() - 1 - k
        left, right = padding[2 * k : 2 * k + 2]
        before, after = ([edge(x, d, n, end)] if n else [] for n, end in ((left, False), (right, True)))
        x = torch.cat([*before, x, *after], d)
    return x


def _pad_by_backward(grad: Tensor, x: Tensor, padding: Sequence[int], back: Callable[..., Tensor]) -> Tensor:
    """Computes the gradient of `pad_by`; `back` converts the gradient of one side's padding to one of the tensor."""
    if min(padding) < 0:
        return NotImplemented
    for k in reversed(range(len(padding) // 2)):
        d = grad.dim() - 1 - k
        n, (left, right) = x.shape[d], padding[2 * k : 2 * k + 2]
        inner = grad.narrow(d, left, n)
        for start, width, end in ((0, left, False), (left + n, right, True)):
            if width:
                inner = inner + back(grad.narrow(d, start, width), d, n, width, end)
        grad = inner
    return grad


def mirror(x: Tensor, d: int, width: int, end: bool) -> Tensor:
    """Computes the padding of reflection: the rows beside the first or the last one, in reverse (an `Edge`)."""
    return x.narrow(d, x.shape[d] - 1 - width if end else 1, width).flip(d)


def mirror_back(edge: Tensor, d: int, n: int, width: int, end: bool) -> Tensor:
    """Computes the gradient of a dim of size n from that of its reflection."""
    start = n - 1 - width if end else 1
    return by.pad_dim(edge.flip(d), d, start, n - start - width)


def last(x: Tensor, d: int, width: int, end: bool) -> Tensor:
    """Computes the padding of replication: the first or the last row, repeated (an `Edge`)."""
    return torch.cat([x.narrow(d, x.shape[d] - 1 if end else 0, 1)] * width, d)


def last_back(edge: Tensor, d: int, n: int, width: int, end: bool) -> Tensor:
    """Computes the gradient of a dim of size n from that of its replication."""
    return by.pad_dim(edge.sum(d, keepdim=True), d, n - 1 if end else 0, 0 if end else n - 1)


def around(x: Tensor, d: int, width: int, end: bool) -> Tensor:
    """Computes circular padding: the rows of the other side (an `Edge`)."""
    return x.narrow(d, 0 if end else x.shape[d] - width, width)


def padding_ops(edge: Edge, back: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Returns the decompositions of a padding op, by concatenation, and of its backward op, which adds gradients."""
    return partial(pad_by, edge=edge), partial(_pad_by_backward, back=back)


OPS: Table = {
    aten.convolution: Entry(convolution, work="matmul", saved=True),
    aten.convolution_backward: Entry(convolution_backward, work="matmul", recorded=by.convolution_backward),
    aten.grid_sampler_2d: letters("ncHW,nyzP->ncyz"),
    aten.grid_sampler_2d_backward: letters("ncyz,ncHW,nyzP->ncHW,nyzP"),
    aten.grid_sampler_3d: letters("ncDHW,nxyzP->ncxyz"),
    aten.grid_sampler_3d_backward: letters("ncxyz,ncDHW,nxyzP->ncDHW,nxyzP"),
    **per_rank("max_unpool{}d", "in,in->out", linear="0"),
    **per_rank("reflection_pad{}d", "in->out", "out,in->in", linear="0", recorded=padding_ops(mirror, mirror_back)),
    **per_rank("replication_pad{}d", "in->out", "out,in->in", linear="0", recorded=padding_ops(last, last_back)),
}
