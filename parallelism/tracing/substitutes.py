"""Replacing torch functions by ones that can be traced, or that shard.

Some read data, only to check it. Others run ops on merged dims, or write what they return piece by piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from tpshard.parallelism.rules.resizing import nearest
from tpshard.parallelism.rules.windows import around, pad_by, per_spatial_dim


class Substitutes(TorchFunctionMode):
    """A mode that replaces the functions in `SUBSTITUTES`; inside a replacement the mode is off."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return SUBSTITUTES.get(func, func)(*args, **(kwargs or {}))


def _one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """F.one_hot without reading the data, which torch's own does inside a `torch.func` transform."""
    if num_classes < 0:  # as many as the data has
        return F.one_hot(input)
    return (input.unsqueeze(-1) == torch.arange(num_classes, device=input.device)).long()


def _cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """torch.cov without the check that the degrees of freedom are positive; with weights, torch.cov itself."""
    if fweights is not None or aweights is not None or input.dim() > 2:
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    rows = input if input.dim() == 2 else input.reshape(1, -1)
    count = rows.shape[1]
    centered = rows - rows.sum(1, keepdim=True) / count
    return (centered @ centered.t().conj() / max(0, count - correction)).squeeze()


def _corrcoef(input: Tensor) -> Tensor:
    if input.is_complex():
        return torch.corrcoef(input)
    cov = _cov(input)
    if cov.dim() == 0:
        return cov / cov
    deviation = cov.diag().sqrt()
    return (cov / deviation.unsqueeze(1) / deviation.unsqueeze(0)).clip(-1, 1)


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """F.gaussian_nll_loss without the check for negative variances; here they count as `eps`, as small ones do."""
    if isinstance(var, Tensor) and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    if not isinstance(var, Tensor) or var.shape[:-1] != input.shape[:-1] or reduction not in REDUCTIONS:
        return F.gaussian_nll_loss(input, target, var, full, eps, reduction)
    var = var + (var.clamp(min=eps) - var).detach()  # the gradient ignores the limit
    loss = 0.5 * (var.log() + (input - target) ** 2 / var) + (0.5 * math.log(2 * math.pi) if full else 0.0)
    return REDUCTIONS[reduction](loss)


def _instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """F.instance_norm without merging batch and channels, of which either may be sharded: a group norm with a group for
    each channel, or, with given statistics, a batch norm. If it updates statistics, F.instance_norm itself."""
    if not use_input_stats:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is not None or running_var is not None or input.shape[2:].numel() == 1:
        return F.instance_norm(input, running_mean, running_var, weight, bias, True, momentum, eps)
    return F.group_norm(input, input.shape[1], weight, bias, eps)


def _pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """F.pad, with circular padding as a concatenation, as other padding is recorded."""
    padded = pad_by(input, pad, around) if mode == "circular" and len(pad) == 2 * (input.dim() - 2) else None
    return F.pad(input, pad, mode, value) if padded is None or padded is NotImplemented else padded


def _stft(
    input: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: Tensor | None = None, center: bool = True, pad_mode: str = "reflect", normalized: bool = False,
    onesided: bool | None = None, return_complex: bool | None = None, *rest: Any, **others: Any,
) -> Tensor:  # fmt: skip
    """torch.stft of real signals by windows of the last dim, while torch's own reads memory by position."""
    given = (hop_length, win_length, window, center, pad_mode, normalized, onesided, return_complex)
    plain = not rest and not any(others.values()) and (window is None or window.is_floating_point())
    if not plain or not return_complex or not input.is_floating_point():
        return torch.stft(input, n_fft, *given, *rest, **others)
    length = n_fft if win_length is None else win_length
    window = torch.ones(length, dtype=input.dtype) if window is None else window
    left = (n_fft - length) // 2
    x = input if input.dim() > 1 else input.unsqueeze(0)
    x = _pad(x.unsqueeze(1), [n_fft // 2] * 2, pad_mode).squeeze(1) if center else x
    frames = x.unfold(-1, n_fft, hop_length or n_fft // 4) * F.pad(window, [left, n_fft - length - left])
    transform = torch.fft.fft if onesided is False else torch.fft.rfft
    result = transform(frames, norm="ortho" if normalized else None).transpose(1, 2)
    return result if input.dim() > 1 else result.squeeze(0)


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.bilinear as two matrix products, whose rows and outputs can both be sharded."""
    if input1.dtype != weight.dtype or input2.dtype != weight.dtype or input1.shape[:-1] != input2.shape[:-1]:
        return F.bilinear(input1, input2, weight, bias)
    out = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return out if bias is None else out + bias


POOLED = "_pooled_windows"
"""The attribute of max pooling's indices that holds its windows, if these lie side by side over the whole image."""


def _max_pool(function: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """Returns F.max_pool with indices, which then know their windows."""

    def pool(
        input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        values, indices = function(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
        kernel = per_spatial_dim(kernel_size, rank)
        beside = per_spatial_dim(stride, rank, kernel) == kernel and not any(per_spatial_dim(padding, rank, 0))
        even = not any(n % k for n, k in zip(input.shape[-rank:], kernel))
        if beside and even and input.dim() == rank + 2 and set(per_spatial_dim(dilation, rank)) == {1}:
            setattr(indices, POOLED, kernel)
        return values, indices

    return pool


def _max_unpool(function: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """Returns F.max_unpool, in which each position of a window that max pooling made chooses its value or 0, so that
    images stay sharded; torch's own writes to positions of a merged dim."""

    def unpool(
        input: Tensor, indices: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, output_size: Any = None
    ) -> Tensor:
        kernel = per_spatial_dim(kernel_size, rank)
        size = [n * k for n, k in zip(input.shape[-rank:], kernel)]
        same = getattr(indices, POOLED, None) == kernel == per_spatial_dim(stride, rank, kernel)
        whole = output_size is None or [*output_size][-rank:] == size
        if not same or not whole or any(per_spatial_dim(padding, rank, 0)) or input.shape != indices.shape:
            return function(input, indices, kernel_size, stride, padding, output_size)  # type: ignore[no-any-return]
        place = torch.arange(math.prod(size), device=input.device).view(size)
        return torch.where(nearest(indices, size) == place, nearest(input, size), 0)

    return unpool


POOLS = (F.max_pool1d_with_indices, F.max_pool2d_with_indices, F.max_pool3d_with_indices)
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "mean": Tensor.mean, "sum": Tensor.sum}
SUBSTITUTES: dict[Any, Callable[..., Tensor]] = {
    F.one_hot: _one_hot,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    torch.cov: _cov,
    Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    F.instance_norm: _instance_norm,
    F.pad: _pad,
    torch.stft: _stft,
    Tensor.stft: _stft,
    Tensor.corrcoef: _corrcoef,
    F.bilinear: _bilinear,
    **{f: _max_pool(f, rank) for rank, f in enumerate(POOLS, 1)},
    **{f: _max_unpool(f, rank) for rank, f in enumerate((F.max_unpool1d, F.max_unpool2d, F.max_unpool3d), 1)},
}
