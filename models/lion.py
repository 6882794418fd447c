"""Lion as a pure function, beside `models.adamw`: one moment, and steps of one size.

Source: Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2. Weight decay is decoupled;
gradients are clipped by their global norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from tpshard.models.adamw import Treatment, clipped, gradient_squares, rebalanced


@dataclass(frozen=True)
class Lion:
    """The optimizer's settings, constant over a run."""

    betas: tuple[float, float] = (0.9, 0.99)
    """Share of the moment in the update, and in the moment's next value."""
    weight_decay: float = 0.1
    clip_grad_norm: float | None = 1.0
    """The global norm to which gradients are clipped; None: no clipping."""


class LionStep(NamedTuple):
    """The new values, in the order of the parameters, and the step's gradient norm."""

    params: list[Tensor]
    exp_avg: list[Tensor]
    grad_norm: Tensor
    """Global norm of the averaged gradient before clipping, fp32 scalar."""
    finite: Tensor
    """Whether loss and norm are finite, a boolean scalar. If not, every value is the old one."""


def lion_update(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    loss_sum: Tensor,
    count: Tensor,
    lr: Tensor,
    *,
    treated: Sequence[Treatment],
    config: Lion,
    squares: Tensor | None = None,
) -> LionStep:
    """One Lion update from the gradients of a *summed* loss; arguments and results as of `adamw.adamw_update`."""
    beta1, beta2 = config.betas
    squares = gradient_squares(grads, count, treated) if squares is None else squares
    norm, finite, scale = clipped(squares, loss_sum, count, config.clip_grad_norm)
    balanced = iter(rebalanced(params, grads, treated, finite))
    moved = LionStep([], [], norm, finite)
    for param, grad, m, how in zip(params, grads, exp_avg, treated, strict=True):
        if how.balance:
            moved.params.append(next(balanced))
            moved.exp_avg.append(m)
            continue
        g, old = grad.to(torch.float32) * scale, m.to(torch.float32)
        p = param.to(torch.float32)
        if how.decay and config.weight_decay:
            p = p * (1.0 - lr * config.weight_decay)
        p = p - lr * torch.sign(old * beta1 + g * (1.0 - beta1))
        moved.params.append(torch.where(finite, p.to(param.dtype), param))
        moved.exp_avg.append(torch.where(finite, (old * beta2 + g * (1.0 - beta2)).to(m.dtype), m))
    return moved
