"""AdamW as arithmetic: from parameters, gradients and moments to new ones, nothing in place, traceable as a whole.

Loshchilov and Hutter 2019; decay is decoupled and gradients are clipped by their global norm (Pascanu et al. 2013).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdamW:
    """What stays the same over a run."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_grad_norm: float | None = 1.0
    """Global norm that gradients are scaled down to; None: off."""


@dataclass(frozen=True)
class Treatment:
    """How one parameter is updated."""

    decay: bool = False
    """Whether it is decayed."""
    balance: float = 0.0
    """Not 0: it is the bias of experts, its gradient is how many tokens each got, and it goes this step towards fewer
    for those above the mean."""


class Updated(NamedTuple):
    """New values, in the order of the parameters, and what the step was like."""

    params: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    grad_norm: Tensor
    """Global norm of the averaged gradient before clipping, fp32 scalar."""
    finite: Tensor
    """Whether loss and norm are finite, a boolean scalar; where they are not, nothing has changed."""


def treatments(shapes: Mapping[str, Sequence[int]], balanced: Mapping[str, float]) -> dict[str, Treatment]:
    """How parameters are updated, by name: matrices are decayed, norms, biases and other vectors are not. `balanced`
    are the biases of experts, and the steps they go."""
    return {n: Treatment(decay=len(shape) >= 2, balance=balanced.get(n, 0.0)) for n, shape in shapes.items()}


def gradient_squares(grads: Sequence[Tensor], count: Tensor, treated: Sequence[Treatment]) -> Tensor:
    """The square of the norm of gradients of a summed loss, averaged over `count` tokens: fp32 scalar. The biases of
    experts are no part of it."""
    share = _share(count)
    learned = [grad for grad, how in zip(grads, treated, strict=True) if not how.balance]
    squares = [(grad.to(torch.float32) * share).square().sum() for grad in learned]
    total = squares[0]
    for square in squares[1:]:
        total = total + square
    return total


def _share(count: Tensor) -> Tensor:
    return 1.0 / count.to(torch.float32).clamp(min=1.0)


def adamw_update(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    loss_sum: Tensor,
    count: Tensor,
    lr: Tensor,
    update: Tensor,
    *,
    treated: Sequence[Treatment],
    config: AdamW,
    squares: Tensor | None = None,
) -> Updated:
    """One update from gradients of a *summed* loss.

    params, grads, exp_avg, exp_avg_sq: one tensor a parameter, of one shape; moments keep their type and are computed
    in fp32. loss_sum: fp32 scalar, the loss summed over all tokens of the step; count: how many tokens that is,
    scalar; gradients are divided by it.
    lr: fp32 scalar; update: fp32 scalar, the number of this update, from 1, which corrects the moments' bias.
    squares: fp32 scalar, what `gradient_squares` makes of all gradients; given where these are not all here.

    Where the loss or the norm is not finite every result is the old value: the decision is part of the arithmetic, so
    that it comes before any update and is the same wherever the scalars are.

    The biases of experts are no part of the norm; they have no moments.
    """
    beta1, beta2 = config.betas
    share = _share(count)
    norm = (gradient_squares(grads, count, treated) if squares is None else squares).sqrt()
    finite = torch.isfinite(norm) & torch.isfinite(loss_sum)
    scale = share
    if config.clip_grad_norm is not None:
        scale = share * (config.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    step_size = lr / (1.0 - torch.pow(beta1, update))
    root_correction = (1.0 - torch.pow(beta2, update)).sqrt()
    means = _means([grad for grad, how in zip(grads, treated) if how.balance])
    made = Updated([], [], [], norm, finite)
    for param, grad, m, v, how in zip(params, grads, exp_avg, exp_avg_sq, treated, strict=True):
        if how.balance:
            made.params.append(torch.where(finite, param - how.balance * torch.sign(grad - next(means)), param))
            made.exp_avg.append(m)
            made.exp_avg_sq.append(v)
            continue
        g = grad.to(torch.float32) * scale
        new_m = m.to(torch.float32) * beta1 + g * (1.0 - beta1)
        new_v = v.to(torch.float32) * beta2 + g.square() * (1.0 - beta2)
        p = param.to(torch.float32)
        if how.decay and config.weight_decay:
            p = p * (1.0 - lr * config.weight_decay)
        p = p - step_size * (new_m / (new_v.sqrt() / root_correction + config.eps))
        made.params.append(torch.where(finite, p.to(param.dtype), param))
        made.exp_avg.append(torch.where(finite, new_m.to(m.dtype), m))
        made.exp_avg_sq.append(torch.where(finite, new_v.to(v.dtype), v))
    return made


def _means(loads: Sequence[Tensor]) -> Iterator[Tensor]:
    """The mean of each; their sums are one value, so that one collective adds up what devices hold."""
    if not loads:
        return iter(())
    sums = torch.stack([load.sum() for load in loads])
    return iter(sums[i] / load.numel() for i, load in enumerate(loads))
