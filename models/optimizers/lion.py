"""Lion as a pure function, like `models.adamw`: one moment per parameter, and updates of which only the sign counts.

Source: Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2. Weight decay is decoupled;
gradients are clipped by their global norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from tpshard.kernels.optimizer_steps import lion_step
from tpshard.models.optimizers.adamw import Treatment, Updated, clip, gradient_squares, rebalance


@dataclass(frozen=True)
class Lion:
    """The optimizer's settings, constant over a run."""

    betas: tuple[float, float] = (0.9, 0.99)
    """Share of the moment in the update, and in the moment's next value."""
    weight_decay: float = 0.1
    clip_grad_norm: float | None = 1.0
    """The global norm to which gradients are clipped; None: no clipping."""


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
) -> Updated:
    """One Lion update from the gradients of a *summed* loss; arguments and results as of `adamw.adamw_update`, without
    `exp_avg_sq`."""
    squares = gradient_squares(grads, count, treated) if squares is None else squares
    norm, finite, scale = clip(squares, loss_sum, count, config.clip_grad_norm)
    balanced = iter(rebalance(params, grads, treated, finite))
    moved = Updated([], [], [], norm, finite)
    for param, grad, m, how in zip(params, grads, exp_avg, treated, strict=True):
        if how.balance:
            new_param, new_m = next(balanced), m
        else:
            decay = how.decay_of(config.weight_decay)
            new_param, new_m = lion_step(param, grad, m, finite, scale, how.lr(lr), *config.betas, decay)
        moved.params.append(new_param)
        moved.exp_avg.append(new_m)
    return moved
