"""Ops over windows of spatial dims: convolution, pooling, resizing, padding by neighbours. These dims are whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tpshard.parallelism.graph import Op, Ref, Value
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.letters import letters
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule, product

aten = torch.ops.aten


class Channels:
    """The factors of a convolution: batch, groups, and the channels of a group, of what comes in and of what goes out.

    `x[n (g i) ...]`, `weight[(g o) i ...]` (transposed: `[(g i) o ...]`), `out[n (g o) ...]`.
    """

    def __init__(self, x: Value, weight: Value, transposed: bool, groups: int):
        self.factors = Factors()
        self.n = self.factors.new(x.shape[0])
        self.g = self.factors.new(groups)
        first = weight.shape[0] // groups
        i, o = (first, weight.shape[1]) if transposed else (weight.shape[1], first)
        self.i, self.o = self.factors.new(i), self.factors.new(o)
        self.transposed = transposed

    def x(self, value: Value) -> tuple[Dim, ...]:
        return ((self.n,), (self.g, self.i), *self.factors.dims(value.shape[2:], Kind.WHOLE))

    def out(self, value: Value) -> tuple[Dim, ...]:
        return ((self.n,), (self.g, self.o), *self.factors.dims(value.shape[2:], Kind.WHOLE))

    def weight(self, value: Value) -> tuple[Dim, ...]:
        first, second = (self.i, self.o) if self.transposed else (self.o, self.i)
        return ((self.g, first), (second,), *self.factors.dims(value.shape[2:], Kind.WHOLE))

    @property
    def bias(self) -> tuple[Dim, ...]:
        return ((self.g, self.o),)

    @property
    def work(self) -> tuple[int, ...]:
        return self.n, self.g, self.i, self.o


def convolution(op: Op) -> Rule:
    """convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    x, weight = op.operands[:2]
    (out,) = op.results
    at_ = Channels(x, weight, op.args[6], op.args[8])
    at_.factors.kinds[at_.i] = Kind.REDUCE

    def local(at: LocalOp) -> Any:
        bias = op.args[2]
        if isinstance(bias, Ref) and at.axes(at_.i):  # added once to what is still to be summed
            once = at.emit(aten.mul.Tensor, at.inputs[2], at.first(at_.i), shape=at.operand_shape(2))
            at.inputs[2] = once
        return at.with_args(*op.args[:8], at.size(at_.g))

    operands = [at_.x(x), at_.weight(weight)] + ([at_.bias] if len(op.operands) > 2 else [])
    flops = 2 * (x.numel * product(weight.shape[1:]) if at_.transposed else out.numel * product(weight.shape[1:]))
    return at_.factors.rule(operands, [at_.out(out)], flops=flops, work=at_.work, local=local)


def convolution_backward(op: Op) -> Rule:
    """convolution_backward(grad, x, weight, bias_sizes, ..., output_mask) -> gradients of x, weight and bias."""
    grad, x, weight = op.operands
    transposed, groups, wanted = op.args[7], op.args[9], op.args[10]
    at_ = Channels(x, weight, transposed, groups)
    at_.factors.kinds[at_.n] = at_.factors.kinds[at_.o] = Kind.REDUCE

    def local(at: LocalOp) -> Any:
        sizes = [at.size(at_.g) * at.size(at_.o)] if op.args[3] is not None else None
        refs = (Ref(0), Ref(1), Ref(2))
        return at.with_args(*refs, sizes, *op.args[4:9], at.size(at_.g), wanted)

    dims = [at_.x(x), at_.weight(weight), at_.bias]
    results = [made if value.rank else () for made, value in zip(dims, op.results)]
    each = 2 * (x.numel if transposed else grad.numel) * product(weight.shape[1:])
    return at_.factors.rule(
        [at_.out(grad), at_.x(x), at_.weight(weight)], results, flops=each * (wanted[0] + wanted[1]), work=at_.work,
        local=local,
    )  # fmt: skip


def sized(position: int) -> Callable[[LocalOp], Any]:
    """Of an op whose argument at `position` is the result's size."""
    return lambda at: at.with_args(*at.op.args[:position], list(at.shape()), *at.op.args[position + 1 :])


SPATIAL = {1: ("W", "Z"), 2: ("HW", "YZ"), 3: ("DHW", "XYZ")}
"""Whole dims of what comes in and of what goes out, by their number."""
OPS: Table = {
    aten.convolution: Entry(convolution, work="matmul", saved=True),
    aten.convolution_backward: Entry(convolution_backward, work="matmul"),
    aten.grid_sampler_2d: letters("ncHW,nyzP->ncyz"),
    aten.grid_sampler_2d_backward: letters("ncyz,ncHW,nyzP->ncHW,nyzP"),
    aten.grid_sampler_3d: letters("ncDHW,nxyzP->ncxyz"),
    aten.grid_sampler_3d_backward: letters("ncxyz,ncDHW,nxyzP->ncDHW,nxyzP"),
}


def _each(names: str, forward: str, backward: str = "", *, linear: str = "", size: int | None = None) -> None:
    """Adds ops, `{}` in a name for the number of spatial dims, and their backward ops. In letters `in` and `out` are
    the spatial dims of what goes in and comes out; `size`: place of the backward's argument with the input's size."""
    for name in names.split():
        for rank, (before, after) in SPATIAL.items():

            def spelled(text: str, before: str = before, after: str = after) -> str:
                return text.replace("out", f"...{after}").replace("in", f"...{before}")

            op = getattr(aten, name.format(rank), None)
            if op is None or op.default.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
                continue  # that is run as others
            back = getattr(aten, name.format(rank) + "_backward", None)
            OPS[op] = letters(spelled(forward), linear=linear)
            if back is not None and backward:
                local = sized(size) if size is not None else None
                OPS[back] = letters(spelled(backward), local=local, linear="0")


_each("max_pool{}d_with_indices", "in->out,out", "out,in,out->in")
_each("adaptive_max_pool{}d", "in->out,out", "out,in,out->in")
_each("avg_pool{}d _adaptive_avg_pool{}d", "in->out", "out,in->in", linear="0")
_each("max_unpool{}d", "in,in->out", linear="0")
_each("reflection_pad{}d replication_pad{}d", "in->out", "out,in->in", linear="0")
_each("upsample_nearest{}d _upsample_nearest_exact{}d", "in->out", "out->in", linear="0", size=2)
_each("upsample_linear{}d upsample_bilinear{}d upsample_trilinear{}d", "in->out", "out->in", linear="0", size=2)
_each("upsample_bicubic{}d _upsample_bilinear{}d_aa _upsample_bicubic{}d_aa", "in->out", "out->in", linear="0", size=2)
