"""Muon as a pure function: matrices of the layers move by an orthogonal matrix, other parameters by `models.adamw`.

Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks", with weight decay and the scale
of Liu et al. 2025 (arXiv 2502.16982, section 2.2), for which AdamW's learning rate and decay remain right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tpshard.models.optimizers.adamw import AdamW, Treatment, Updated, adamw_update, clip, gradient_squares

STEPS = 5
"""Newton-Schulz iterations of an update."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration's polynomial in the singular values, which end between 0.7 and 1.2."""
SCALE = 0.2
"""Root mean square of an update, as AdamW's typically is."""

Spread = Callable[[Tensor, int], Tensor]
"""(matrices [n, rows, columns], index of a parameter among them) -> the same, annotated so that devices share them."""


@dataclass(frozen=True)
class Muon:
    """The optimizer's settings, constant over a run."""

    adamw: AdamW = field(default_factory=AdamW)
    """Settings for the parameters that are no matrices of a layer; decay and clipping are for all."""
    momentum: float = 0.95
    """Share of a matrix's moment that remains each step (Nesterov)."""
    dtype: torch.dtype = torch.bfloat16
    """dtype of the iteration that makes matrices orthogonal."""


def muon_update(
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
    config: Muon,
    squares: Tensor | None = None,
    alike: Sequence[Hashable] = (),
    spread: Spread = lambda matrices, param: matrices,
) -> Updated:
    """One Muon update from the gradients of a *summed* loss; arguments and results as of `adamw.adamw_update`.

    Parameters treated as `orthogonal` are matrices, or stacks of them [n, rows, columns]; exp_avg_sq has a tensor only
    for each of the others. Matrices of one shape, for which `alike` has equal entries, are iterated together: with
    `spread` the engine exchanges shards of all of them for whole ones on each device, once in each direction.
    """
    squares = gradient_squares(grads, count, treated) if squares is None else squares
    norm, finite, scale = clip(squares, loss_sum, count, config.adamw.clip_grad_norm)
    others = [i for i, how in enumerate(treated) if not how.orthogonal]
    rest = adamw_update(
        [params[i] for i in others], [grads[i] for i in others], [exp_avg[i] for i in others], exp_avg_sq, loss_sum,
        count, lr, update, treated=[treated[i] for i in others], config=config.adamw, squares=squares,
    )  # fmt: skip
    new_params, new_moments = dict(zip(others, rest.params)), dict(zip(others, rest.exp_avg))
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i, how in enumerate(treated):
        if how.orthogonal:  # stacks of matrices, such as those of experts, are groups by themselves
            groups[(params[i].shape, alike[i] if alike else None) if params[i].dim() == 2 else i].append(i)
    for group in groups.values():
        moments: dict[int, Tensor] = {}
        directions: list[Tensor] = []
        for i in group:
            g, m = grads[i].to(torch.float32) * scale, exp_avg[i].to(torch.float32)
            moments[i] = m + (g - m) * (1.0 - config.momentum)
            directions.append((g + (moments[i] - g) * config.momentum).to(config.dtype))
        single = directions[0].dim() == 2
        stack = torch.stack(directions) if single else directions[0]
        stack = spread(orthogonalize(spread(stack, group[0])), group[0])
        for i, direction in zip(group, stack.unbind() if single else [stack], strict=True):
            p = params[i].to(torch.float32)
            rate = treated[i].lr(lr)
            if decay := treated[i].decay_of(config.adamw.weight_decay):
                p = p * (1.0 - rate * decay)
            p = p - rate * (SCALE * max(direction.shape[-2:]) ** 0.5) * direction.to(torch.float32)
            new_params[i] = torch.where(finite, p.to(params[i].dtype), params[i])
            new_moments[i] = torch.where(finite, moments[i].to(exp_avg[i].dtype), exp_avg[i])
    every = range(len(params))
    return Updated([new_params[i] for i in every], [new_moments[i] for i in every], rest.exp_avg_sq, norm, finite)


def orthogonalize(matrices: Tensor) -> Tensor:
    """The matrices [..., rows, columns] with all singular values near 1: U V^T of U S V^T, approximately.

    By five Newton-Schulz iterations in the matrices' dtype.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.square().sum((-2, -1), keepdim=True, dtype=torch.float32).sqrt().clamp(min=1e-7).to(x.dtype)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x
