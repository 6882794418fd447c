"""AdamW as a pure function: from parameters, gradients and moments to new ones, out of place, traceable as one graph.

Source: Loshchilov and Hutter 2019. Weight decay is decoupled; gradients are clipped by their global norm (Pascanu et
al. 2013).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from tpshard.kernels.optimizer_steps import adamw_step, square_sum


@dataclass(frozen=True)
class AdamW:
    """The optimizer's settings, constant over a run."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_grad_norm: float | None = 1.0
    """The global norm to which gradients are clipped; None: no clipping."""


@dataclass(frozen=True)
class Treatment:
    """The settings by which an optimizer treats one parameter: decay, balancing, orthogonal moves."""

    decay: bool = False
    """Whether weight decay applies to it."""
    balance: float = 0.0
    """The amount by which each step moves a bias of a mixture's experts; 0 for all other parameters. The gradient of
    such a bias is each expert's number of tokens. The bias falls for experts above the mean and rises for others."""
    orthogonal: bool = False
    """Whether it is a matrix of a layer, or a stack of them, that Muon moves."""
    rate: float = 1.0
    """The factor of its learning rate."""
    own_decay: float | None = None
    """A weight decay of its own, also for a vector; None: that of all."""

    def decay_of(self, every: float) -> float:
        """Its weight decay, where that of all matrices is `every`."""
        return self.own_decay if self.own_decay is not None else every if self.decay else 0.0

    def lr(self, every: Tensor) -> Tensor:
        """Its learning rate, where that of all is `every`."""
        return every if self.rate == 1.0 else every * self.rate


class Updated(NamedTuple):
    """The results of an update: new values in the order of the parameters, and the norm of the gradient."""

    params: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    grad_norm: Tensor
    """Global norm of the averaged gradient before clipping, fp32 scalar."""
    finite: Tensor
    """Whether there is a target, and loss and norm are finite, a boolean scalar. If not, every value is the old one."""


def treatments(
    shapes: Mapping[str, Sequence[int]], balanced: Mapping[str, float], orthogonal: Container[str] = (),
    groups: Mapping[str, tuple[float, float | None]] = MappingProxyType({}),
) -> dict[str, Treatment]:  # fmt: skip
    """The Treatment of each parameter by name: matrices are decayed; norms, biases and other vectors are not.

    balanced: the biases of experts by name, with their step. orthogonal: the names of the matrices that Muon moves.
    groups: (factor of the learning rate, weight decay) of those that have their own.
    """
    return {
        n: Treatment(len(shape) >= 2, balanced.get(n, 0.0), n in orthogonal, *groups.get(n, (1.0, None)))
        for n, shape in shapes.items()
    }


def gradient_squares(grads: Sequence[Tensor], count: Tensor, treated: Sequence[Treatment]) -> Tensor:
    """The squared global norm of the gradients, averaged over `count` tokens: fp32 scalar.

    Experts' biases are left out.
    """
    share = _share(count)
    learned = [grad for grad, how in zip(grads, treated, strict=True) if not how.balance]
    squares = [square_sum(grad, share) for grad in learned]
    if not squares:
        return count.new_zeros((), dtype=torch.float32)
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
    """One AdamW update from the gradients of a *summed* loss.

    params, grads, exp_avg, exp_avg_sq: one tensor per parameter, of its shape; moments keep their dtype and are
    computed in fp32. loss_sum: fp32 scalar, the loss summed over the step's tokens. count: scalar, the number of these
    tokens; gradients are divided by it. lr: fp32 scalar. update: fp32 scalar, this update's number from 1, for the
    moments' bias correction. squares: fp32 scalar, `gradient_squares` of all gradients; required where `grads` are only
    some.

    Where the loss or the norm is not finite, or `count` is 0, every result is the old value. Every device decides this
    from the same scalars, so that all decide alike. The biases of experts are not in the norm and have no moments.
    """
    squares = gradient_squares(grads, count, treated) if squares is None else squares
    norm, finite, scale = clip(squares, loss_sum, count, config.clip_grad_norm)
    balanced = iter(rebalance(params, grads, treated, finite))
    updated = Updated([], [], [], norm, finite)
    for param, grad, m, v, how in zip(params, grads, exp_avg, exp_avg_sq, treated, strict=True):
        if how.balance:
            new_param, new_m, new_v = next(balanced), m, v
        else:
            decay = how.decay_of(config.weight_decay)
            new_param, new_m, new_v = adamw_step(
                param, grad, m, v, finite, scale, how.lr(lr), update, *config.betas, config.eps, decay
            )
        updated.params.append(new_param)
        updated.exp_avg.append(new_m)
        updated.exp_avg_sq.append(new_v)
    return updated


def clip(squares: Tensor, loss_sum: Tensor, count: Tensor, most: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of the averaged gradient, whether it and the loss are finite and there is a target, and the factor that
    averages and clips a summed gradient: scalars. `most` is the norm that is clipped to; None: no clipping."""
    share, norm = _share(count), squares.sqrt()
    finite = torch.isfinite(norm) & torch.isfinite(loss_sum) & (count > 0)
    return norm, finite, share if most is None else share * (most / (norm + 1e-6)).clamp(max=1.0)


def rebalance(
    params: Sequence[Tensor], grads: Sequence[Tensor], treated: Sequence[Treatment], finite: Tensor
) -> list[Tensor]:
    """Moves experts' biases by their `balance` and returns them in order; the old ones where `finite` is false."""
    chosen = [(p, load, how.balance) for p, load, how in zip(params, grads, treated, strict=True) if how.balance]
    means = _means([load for _, load, _ in chosen])
    return [torch.where(finite, p - rate * torch.sign(load - next(means)), p) for p, load, rate in chosen]


def _means(loads: Sequence[Tensor]) -> Iterator[Tensor]:
    """The mean of each tensor. Their sums are stacked, so that one collective reduces all of them."""
    if not loads:
        return iter(())
    sums = torch.stack([load.sum() for load in loads])
    return iter(sums[i] / load.numel() for i, load in enumerate(loads))
