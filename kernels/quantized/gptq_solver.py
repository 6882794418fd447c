"""GPTQ: quantizes a linear one input at a time, and adjusts the remaining inputs to compensate each rounding error.

Source: Frantar et al. 2022 ("GPTQ"), with act-order, static groups and damping as in its later implementations. With
an identity Hessian nothing is compensated, and the result is round-to-nearest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from tpshard.kernels.quantized.quantized import Quantized, group_count, group_index

Order = Literal["global", "head_local", "none"]
_BLOCK = 128
"""Inputs solved before the inputs after them are updated; within a block only the block is updated."""
_TINIEST = 2.0**-24  # the smallest fp16


@dataclass(frozen=True)
class Settings:
    """The settings of quantization. bits: 2, 3, 4 or 8. group_size: inputs per scale; -1 is one group.

    damp: the share of the Hessian's mean diagonal added to its diagonal. static_groups: scales from the original
    weights, and groups of neighbouring inputs whatever the order of solving.
    """

    bits: int = 4
    group_size: int = 128
    sym: bool = True
    static_groups: bool = False
    damp: float = 0.01


@dataclass(frozen=True)
class Ordering:
    """The order in which inputs are solved, int64 [inputs], and the group of each input, int32 [inputs]."""

    sequence: Tensor
    group: Tensor


@dataclass(frozen=True)
class Heads:
    """The attention heads that feed o_proj: `heads` of `head_dim`, of which `heads / kv_heads` share a KV head."""

    heads: int
    kv_heads: int
    head_dim: int


def ordering(importance: Tensor, settings: Settings, order: Order, heads: Heads | None = None) -> Ordering:
    """The act-order of inputs with this `importance` [inputs] (the Hessian's diagonal): most important first.

    `head_local` applies to inputs that come from attention heads (`heads`), elsewhere it equals `global`: groups never
    cross heads, and the query heads of a KV head share one order within the head, so that the order can be absorbed
    into V. Raises ValueError where neither of group_size and head_dim divides the other.
    """
    inputs, device = len(importance), importance.device
    neighbours = group_index(inputs, settings.group_size, device)
    if order == "none":
        return Ordering(torch.arange(inputs, device=device), neighbours)
    size = inputs if settings.group_size == -1 else settings.group_size
    if order == "head_local" and heads is not None:
        if size < heads.head_dim:
            return _order_in_heads(importance, size, heads)
        if size % heads.head_dim and size != inputs:
            raise ValueError(
                f"Groups of {size} inputs and heads of {heads.head_dim} do not divide one another: a head-local order "
                "needs one to be a multiple of the other."
            )
        return Ordering(torch.arange(inputs, device=device), neighbours)
    sequence = torch.argsort(importance, descending=True, stable=True)
    if settings.static_groups:
        return Ordering(sequence, neighbours)
    group = torch.empty_like(neighbours)
    group[sequence] = neighbours
    return Ordering(sequence, group)


def _order_in_heads(importance: Tensor, size: int, heads: Heads) -> Ordering:
    """The order of `head_local` where groups of `size` inputs are smaller than a head."""
    if heads.head_dim % size:
        raise ValueError(
            f"Groups of {size} inputs and heads of {heads.head_dim} do not divide one another: a head-local order "
            "needs one to be a multiple of the other."
        )
    per_head = importance.view(heads.kv_heads, heads.heads // heads.kv_heads, heads.head_dim)
    inner = torch.argsort(per_head.sum(1), dim=1, descending=True, stable=True)  # [kv_heads, head_dim]
    inner = inner.repeat_interleave(heads.heads // heads.kv_heads, 0)
    rows = inner + torch.arange(heads.heads, device=inner.device)[:, None] * heads.head_dim
    sequence = rows.flatten()
    group = torch.empty(len(importance), dtype=torch.int32, device=inner.device)
    group[sequence] = group_index(len(importance), size, inner.device)
    # Whole groups in order of importance: later groups can compensate the errors of earlier ones.
    weight = importance[sequence].view(-1, size).sum(1)
    by_group = torch.argsort(weight, descending=True, stable=True)
    return Ordering(sequence.view(-1, size)[by_group].flatten(), group)


def grid(weights: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """The scale and zero of each output for one group's weights [outputs, inputs]: fp16 and uint8, [outputs].

    Zeros are at least 1, which every reader of format version 1 understands. A group of zero weights gets scale 1.
    """
    most = (1 << settings.bits) - 1
    low, high = weights.amin(1).clamp(max=0.0), weights.amax(1).clamp(min=0.0)
    if settings.sym:
        high = torch.maximum(-low, high)
        low = -high
    spread = high - low
    scales = torch.where(spread > 0, spread / most, 1.0).to(torch.float16)
    if not bool(torch.isfinite(scales).all()):
        raise ValueError(f"weights of up to {float(weights.abs().max()):.3g} need scales beyond the range of fp16")
    scales = scales.clamp(min=_TINIEST)
    if settings.sym:
        zeros = torch.full_like(scales, 1 << (settings.bits - 1))
    else:
        zeros = torch.round(-low / scales.to(low.dtype)).clamp(1, most)
    return scales, zeros.to(torch.uint8)


def _round(weights: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """The code of each weight's nearest grid value, as floats in the dtype of `weights`."""
    return (torch.round(weights / scales) + zeros).clamp(0, (1 << bits) - 1)


def round_to_nearest(weight: Tensor, settings: Settings, plan: Ordering | None = None) -> Quantized:
    """Rounds every weight [outputs, inputs] to its nearest grid value: the baseline that GPTQ must beat."""
    plan = plan or ordering(weight.new_ones(weight.shape[1]), settings, "none")
    return solve(weight, torch.eye(weight.shape[1], device=weight.device), settings, plan)


def solve(weight: Tensor, hessian: Tensor, settings: Settings, plan: Ordering) -> Quantized:
    """Quantizes weight [outputs, inputs] by GPTQ, and returns it as a linear [inputs, outputs].

    hessian [inputs, inputs]: any positive multiple of the sum of x x^T. Raises ValueError where either is not finite.
    """
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("weights are not finite")
    if not bool(torch.isfinite(hessian).all()):
        raise ValueError("the activations of the calibration text are not finite")
    sequence, group = plan.sequence, plan.group.long()
    outputs, inputs = weight.shape
    work = weight.to(torch.float32)[:, sequence].clone()
    upper = _inverse_factor(hessian[sequence][:, sequence], settings.damp).to(torch.float32)
    group = group[sequence]
    groups = group_count(inputs, settings.group_size)
    scales = torch.empty(groups, outputs, dtype=torch.float16, device=weight.device)
    zeros = torch.empty(groups, outputs, dtype=torch.uint8, device=weight.device)
    gridded = torch.zeros(groups, dtype=torch.bool)
    members = group.cpu()
    if settings.static_groups or not _runs(members):
        for g in range(groups):
            scales[g], zeros[g] = grid(work[:, group == g], settings)
        gridded[:] = True
    codes = torch.empty(inputs, outputs, dtype=torch.uint8, device=weight.device)
    for start in range(0, inputs, _BLOCK):
        stop = min(start + _BLOCK, inputs)
        errors = torch.empty(outputs, stop - start, device=weight.device)
        for i in range(start, stop):
            g = int(members[i])
            if not gridded[g]:  # the group's first input: fit its grid to the weights as adjusted so far
                end = i + int((members[i:] == g).sum())
                if end > stop:  # apply the block's pending updates to the inputs after it
                    pending = errors[:, : i - start] @ upper[start:i, stop:end]
                    scales[g], zeros[g] = grid(torch.cat([work[:, i:stop], work[:, stop:end] - pending], 1), settings)
                else:
                    scales[g], zeros[g] = grid(work[:, i:end], settings)
                gridded[g] = True
            scale, zero = scales[g].float(), zeros[g].float()
            code = _round(work[:, i], scale, zero, settings.bits)
            codes[i] = code.to(torch.uint8)
            errors[:, i - start] = (work[:, i] - scale * (code - zero)) / upper[i, i]
            work[:, i:stop] -= errors[:, i - start, None] * upper[i, i:stop]
        work[:, stop:] -= errors @ upper[start:stop, stop:]
    back = torch.empty_like(codes)
    back[sequence] = codes
    return Quantized(back, scales, zeros, plan.group.to(torch.int32), settings.bits)


def _runs(members: Tensor) -> bool:
    """Whether the inputs of every group are consecutive."""
    runs = torch.unique_consecutive(members)
    return len(runs) == len(torch.unique(runs))


def _inverse_factor(hessian: Tensor, damp: float) -> Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse, fp64.

    Zeros on the diagonal become 1. The damping grows until the factor exists.
    """
    h = hessian.to(torch.float64).clone()
    diagonal = h.diagonal()
    diagonal[diagonal == 0] = 1.0
    mean = diagonal.mean().clone()
    for _ in range(6):
        damped = h + torch.eye(len(h), dtype=h.dtype, device=h.device) * (damp * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
        damp = max(damp, 1e-4) * 10
    raise ValueError("the Hessian of the calibration text is not positive definite, even when damped")


class Hessian:
    """Running means over calibration inputs x: `mean()` of x x^T, and `cross()` of d x^T, both [inputs, inputs].

    `add` takes x and d [..., inputs]; d is what x would be if no earlier layer were quantized.
    """

    def __init__(self, inputs: int, device: torch.device | str = "cpu"):
        self.sum = torch.zeros(inputs, inputs, dtype=torch.float32, device=device)
        self.crossed = torch.zeros_like(self.sum)
        self.rows = 0

    def add(self, x: Tensor, dense: Tensor | None = None) -> None:
        """Adds calibration inputs x, and what they would be in the dense model (default: x itself)."""
        rows = x.reshape(-1, x.shape[-1]).to(torch.float32)
        self.sum.addmm_(rows.T, rows)
        self.crossed.addmm_((rows if dense is None else dense.reshape(rows.shape).to(torch.float32)).T, rows)
        self.rows += len(rows)

    def mean(self) -> Tensor:
        """The mean of x x^T, fp32 [inputs, inputs]."""
        return self.sum / max(self.rows, 1)

    def cross(self) -> Tensor:
        """The mean of d x^T, fp32 [inputs, inputs]."""
        return self.crossed / max(self.rows, 1)


def compensate(weight: Tensor, hessian: Tensor, cross: Tensor, damp: float) -> Tensor:
    """Adjusts weight [outputs, inputs] so that its outputs on the actual inputs match those on the error-free inputs.

    Least squares, drawn towards `weight` by the damping ("GPTAQ", Li et al. 2025). Equal inputs return `weight`.
    """
    h, c = hessian.to(torch.float64), cross.to(torch.float64)
    more = damp * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype, device=h.device)
    change, failed = torch.linalg.solve_ex(h + more, (c - h).T)
    if int(failed) or not bool(torch.isfinite(change).all()):
        return weight
    return weight + (weight.to(torch.float64) @ change.T).to(weight.dtype)


def relative_error(weight: Tensor, quantized: Quantized, hessian: Tensor) -> float:
    """The relative error of the quantized outputs over the calibration inputs X: ||(W - Q) X|| / ||W X||."""
    difference = weight.to(torch.float32) - quantized.dequantize(torch.float32).T
    h = hessian.to(torch.float32)
    lost = (difference @ h * difference).sum().clamp(min=0)
    whole = (weight.to(torch.float32) @ h * weight.to(torch.float32)).sum()
    return float((lost / whole).sqrt()) if float(whole) > 0 else 0.0
