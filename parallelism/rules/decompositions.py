"""Decompositions that torch lacks, or that shard better than torch's, such as statistics by plain sums over dims.

A decomposition returns NotImplemented for a call that it does not support; the op is then recorded itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def flatten_first(op: Any) -> Callable[..., Tensor]:
    """Returns a decomposition of argmax or argmin (`op`) over all elements: it flattens the tensor to one dim first."""

    def flat(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is not None or x.dim() == 0:
            return NotImplemented
        place: Tensor = op(x.reshape(-1), 0)
        return place.reshape([1] * x.dim()) if keepdim else place

    return flat


def variance(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    """Computes var.correction as the mean of squared deviations."""
    return variance_and_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def variance_and_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes var_mean.correction by the mean of squared deviations from the mean, of which there is one."""
    dims = list(range(x.dim())) if not dim else [d % x.dim() for d in dim]
    count = math.prod(x.shape[d] for d in dims)
    mean = x.mean(dims, keepdim=True)
    deviation = x - mean
    squares = (deviation * deviation.conj()).real if x.is_complex() else deviation * deviation
    spread = squares.sum(dims, keepdim=keepdim) / max(0.0, count - (1 if correction is None else correction))
    return spread, mean if keepdim else mean.squeeze(dims)


def _statistics_dims(x: Tensor) -> list[int]:
    """Returns the dims over which batch norm takes the statistics of a channel: all but dim 1."""
    return [d for d in range(x.dim()) if d != 1]


def _per_channel(x: Tensor, of_channels: Tensor) -> Tensor:
    """Views a tensor [channels] so that it broadcasts to x [batch, channels, ...]."""
    return of_channels.view([-1 if d == 1 else 1 for d in range(x.dim())])


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes native_batch_norm, with statistics of the whole batch over all devices."""
    computed = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(computed)
    if training:
        mean = wide.mean(_statistics_dims(x))
        deviation = wide - _per_channel(x, mean)
        var = (deviation * deviation).mean(_statistics_dims(x))
        invstd = (var + eps).rsqrt()
        count = x.numel() // x.shape[1]
        if running_mean is not None:
            running_mean.copy_(running_mean * (1 - momentum) + momentum * mean.to(running_mean.dtype))
        if running_var is not None:
            unbiased = var * (count / max(1, count - 1))
            running_var.copy_(running_var * (1 - momentum) + momentum * unbiased.to(running_var.dtype))
        saved = mean, invstd
    else:
        assert running_mean is not None and running_var is not None
        mean, invstd = running_mean.to(computed), (running_var.to(computed) + eps).rsqrt()
        deviation = wide - _per_channel(x, mean)
        saved = x.new_zeros(0), x.new_zeros(0)
    out = deviation * _per_channel(x, invstd)
    if weight is not None:
        out = out * _per_channel(x, weight.to(computed))
    if bias is not None:
        out = out + _per_channel(x, bias.to(computed))
    return out.to(x.dtype), *saved


def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    mean: Tensor | None, invstd: Tensor | None, training: bool, eps: float, output_mask: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Computes native_batch_norm_backward: the gradients of x, weight and bias."""
    computed = torch.promote_types(x.dtype, torch.float32)
    if not training:
        assert running_mean is not None and running_var is not None
        mean, invstd = running_mean.to(computed), (running_var.to(computed) + eps).rsqrt()
    assert mean is not None and invstd is not None
    wide_grad, over = grad.to(computed), _statistics_dims(x)
    normed = (x.to(computed) - _per_channel(x, mean)) * _per_channel(x, invstd)
    to_bias, to_weight = wide_grad.sum(over), (wide_grad * normed).sum(over)
    scale = invstd if weight is None else invstd * weight.to(computed)
    to_x = wide_grad
    if training:
        count = x.numel() // x.shape[1]
        to_x = wide_grad - _per_channel(x, to_bias / count) - normed * _per_channel(x, to_weight / count)
    gradients = (
        (to_x * _per_channel(x, scale)).to(x.dtype),
        to_weight.to(weight.dtype) if weight is not None else to_weight,
        to_bias.to(weight.dtype) if weight is not None else to_bias,
    )
    return _select_gradients(gradients, output_mask)


def _select_gradients(gradients: Gradients, output_mask: Sequence[bool]) -> Gradients:
    """The gradients that the caller needs; None in place of the others."""
    return tuple(one if needed else None for one, needed in zip(gradients, output_mask))  # type: ignore[return-value]


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, channels: int, rest: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes native_group_norm with separate dims for groups and their channels, so that each can be sharded."""
    computed = torch.promote_types(x.dtype, torch.float32)
    parts = x.to(computed).view(n, groups, channels // groups, *x.shape[2:])
    over = list(range(2, parts.dim()))
    mean = parts.mean(over, keepdim=True)
    deviation = parts - mean
    rstd = ((deviation * deviation).mean(over, keepdim=True) + eps).rsqrt()
    out = (deviation * rstd).view(x.shape)
    if weight is not None:
        out = out * _per_channel(x, weight.to(computed))
    if bias is not None:
        out = out + _per_channel(x, bias.to(computed))
    return out.to(x.dtype), mean.view(n, groups).to(x.dtype), rstd.view(n, groups).to(x.dtype)


def group_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, n: int, channels: int, rest: int,
    groups: int, output_mask: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Computes native_group_norm_backward: the gradients of x, weight and bias."""
    computed = torch.promote_types(x.dtype, torch.float32)
    each = (n, groups, *[1] * (x.dim() - 1))
    split = (n, groups, channels // groups, *x.shape[2:])
    over = list(range(2, len(split)))
    normed = (x.to(computed).view(split) - mean.to(computed).view(each)) * rstd.to(computed).view(each)
    wide_grad = grad.to(computed)
    weighted = wide_grad if weight is None else wide_grad * _per_channel(x, weight.to(computed))
    parts = weighted.view(split)
    inner = parts - parts.mean(over, keepdim=True) - normed * (parts * normed).mean(over, keepdim=True)
    gradients = (
        (inner * rstd.to(computed).view(each)).view(x.shape).to(x.dtype),
        (wide_grad * normed.view(x.shape)).sum(_statistics_dims(x)).to(x.dtype),
        wide_grad.sum(_statistics_dims(x)).to(x.dtype),
    )
    return _select_gradients(gradients, output_mask)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """Computes _weight_norm_interface: v scaled to the norms g along a dim, and the norms of v."""
    norms = v.norm(2, [d for d in range(v.dim()) if d != dim % v.dim()], keepdim=True)
    return v * (g / norms), norms


def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Computes _weight_norm_interface_backward: the gradients of v and g."""
    along = (grad * v).sum([d for d in range(v.dim()) if d != dim % v.dim()], keepdim=True)
    return (grad - v * (along / (norms * norms))) * (g / norms), along / norms


def copy_over(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Computes copy as a cast of its source, since the target's values are not read."""
    if x.shape != source.shape or x.stride() != source.stride():
        return NotImplemented
    return source if source.dtype == x.dtype else source.to(x.dtype)


def put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Computes an index_put of one value by one mask as `where`."""
    masks = [i for i in indices if i is not None]
    if len(masks) != 1 or masks[0].dtype not in (torch.bool, torch.uint8) or values.numel() != 1:
        return NotImplemented
    before = next(d for d, i in enumerate(indices) if i is not None)
    mask = masks[0].to(torch.bool).view(*masks[0].shape, *[1] * (x.dim() - before - masks[0].dim()))
    value: Any = values.reshape(())
    return torch.where(mask, x + value if accumulate else value, x)


def euclidean_distance(x: Tensor, y: Tensor) -> Tensor:
    """Computes _euclidean_dist by one product and two sums, and not with their columns put together beside it."""
    squares = [(points * points).sum(-1) for points in (x, y)]
    products = x.matmul(y.mT)
    return (squares[0].unsqueeze(-1) + squares[1].unsqueeze(-2) - 2 * products).clamp(min=0).sqrt()


def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Computes a roll over all elements, of no dim, as one of a single dim."""
    return NotImplemented if dims or x.dim() < 2 else x.reshape(-1).roll(shifts, [0]).reshape(x.shape)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Computes stack by concatenating along a new dim, so that all dims keep their shardings."""
    return torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def slice_backward(
    grad: Tensor, sizes: Sequence[int], dim: int, start: int | None, stop: int | None, step: int
) -> Tensor:
    """Computes slice_backward by padding the gradient with zeros, which keeps partial sums partial."""
    if step != 1:
        return aten.slice_scatter.default(grad.new_zeros(sizes), grad, dim, start, stop, step)
    begin, _, _ = slice(start, stop).indices(sizes[dim])
    return pad_dim(grad, dim, begin, sizes[dim] - begin - grad.shape[dim])


def select_backward(grad: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    """Computes select_backward by padding the gradient with zeros."""
    dim %= len(sizes)
    return pad_dim(grad.unsqueeze(dim), dim, index % sizes[dim], sizes[dim] - 1 - index % sizes[dim])


def pad_dim(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Pads one dim with zeros."""
    return aten.constant_pad_nd.default(x, [0, 0] * (x.dim() - 1 - dim % x.dim()) + [before, after])


def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Computes diagonal as the main diagonal of the part of x in which it is that and both dims are of one size."""
    starts = max(-offset, 0), max(offset, 0)
    size = max(min(x.shape[d] - start for d, start in zip((dim1, dim2), starts)), 0)
    if x.shape[dim1] == x.shape[dim2] == size:
        return NotImplemented
    return x.narrow(dim1, starts[0], size).narrow(dim2, starts[1], size).diagonal(0, dim1, dim2)


def _beside_diagonal(x: Tensor, offset: int, dim1: int, dim2: int) -> Tensor:
    """A mask that broadcasts to x: true outside of a diagonal."""
    places = [
        torch.arange(x.shape[d], device=x.device).view([-1 if e == d % x.dim() else 1 for e in range(x.dim())])
        for d in (dim1, dim2)
    ]
    return places[1] - places[0] != offset


def _over_dims(values: Tensor, shape: Sequence[int], offset: int, dim1: int, dim2: int) -> Tensor:
    """The values of a diagonal [..., size], one in each row of a tensor of `shape`, in which they broadcast."""
    first, second, start = dim1 % len(shape), dim2 % len(shape), max(-offset, 0)
    rows = pad_dim(values, -1, start, shape[first] - start - values.shape[-1])
    return rows.movedim(-1, first - (second < first)).unsqueeze(second)


def diagonal_scatter(x: Tensor, values: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Computes diagonal_scatter as a choice by position between x and the values."""
    mask = _beside_diagonal(x, offset, dim1, dim2)
    return torch.where(mask, x, _over_dims(values, x.shape, offset, dim1, dim2))


def diagonal_backward(grad: Tensor, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Tensor:
    """Computes diagonal_backward by zeros around the gradient, which keeps partial sums partial."""
    spread = _over_dims(grad, sizes, offset, dim1, dim2).expand(sizes)
    return spread.masked_fill(_beside_diagonal(spread, offset, dim1, dim2), 0)


def addmm(c: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Computes addmm with factors alpha and beta as a product and a sum; without factors the op has a rule."""
    if alpha == beta == 1:
        return NotImplemented
    return aten.mm.default(x, y) * alpha + (c * beta if beta else torch.zeros_like(c))


def addbmm(c: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Computes addbmm as a batched product, its sum over the batch, and a sum."""
    product = aten.bmm.default(x, y).sum(0)
    return (product if alpha == 1 else product * alpha) + (c if beta == 1 else c * beta)


def multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """Computes multilabel_margin_loss_forward: the loss, and a mask of each row's targets, which the first -1 ends.

    torch's decomposition also counts what stands behind that.
    """
    classes, rows, labels = x.shape[-1], x.reshape(-1, x.shape[-1]), target.reshape(-1, x.shape[-1])
    listed = (labels < 0).cumsum(1) == 0
    chosen = labels.where(listed, 0)
    marks = torch.zeros_like(rows).scatter_add(1, chosen, listed.to(x.dtype)) > 0
    margins = (1 - rows.gather(1, chosen).unsqueeze(2) + rows.unsqueeze(1)).clamp(min=0)
    loss = margins.where(listed.unsqueeze(2) & ~marks.unsqueeze(1), 0).sum((1, 2)) / classes
    loss = loss.reshape(x.shape[:-1]) if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()
    return loss, marks.to(x.dtype).reshape(x.shape)


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    output_mask: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Computes convolution_backward with separate ops: x's gradient by a convolution, the bias's by a sum.

    The weight's gradient is computed by the op itself, which then reads only the weight's shape.
    """
    to_x = to_weight = to_bias = None
    sizes, back = list(zip(x.shape[2:], grad.shape[2:])), [0] * (x.dim() - 2)
    reach = [d * (k - 1) - p for d, k, p in zip(dilation, weight.shape[2:], padding)]
    reads = not transposed and groups == 1 and x.shape[1] > grad.shape[1]  # fewer channels cross between devices
    if output_mask[0] and not transposed:
        spans = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:])]
        back = [n - ((m - 1) * s - 2 * p + span) for (n, m), s, p, span in zip(sizes, stride, padding, spans)]
    if output_mask[0] and reads and {*stride} == {1} and min(reach) >= 0:
        mirrored = weight.flip(list(range(2, x.dim()))).transpose(0, 1)
        to_x = aten.convolution.default(grad, mirrored, None, stride, reach, dilation, False, [0] * len(reach), 1)
    elif output_mask[0]:
        to_x = aten.convolution.default(
            grad, weight, None, stride, padding, dilation, not transposed, back, groups
        )  # fmt: skip
        for d, n in enumerate(x.shape):
            to_x = to_x if to_x.shape[d] == n else to_x.narrow(d, 0, n)
    if output_mask[1]:
        shape = aten.expand.default(weight.new_empty(()), weight.shape)
        to_weight = aten.convolution_backward.default(
            grad, x, shape, None, stride, padding, dilation, transposed, output_padding, groups, [False, True, False]
        )[1]
    if output_mask[2]:
        to_bias = grad.sum([0, *range(2, grad.dim())])
    return to_x, to_weight, to_bias
