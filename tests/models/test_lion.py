"""Lion equals its formula, and shares clipping and decay with AdamW."""

from __future__ import annotations

import torch
from tpshard.models.optimizers.adamw import Treatment
from tpshard.models.optimizers.lion import Lion, lion_update

SHAPES = [(3, 4), (5,)]
TREATED = [Treatment(decay=True), Treatment()]


def tensors(seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random) for shape in SHAPES]


def test_an_update_is_the_formula_and_one_that_is_not_finite_changes_nothing() -> None:
    params, grads, moments = tensors(0), tensors(1), tensors(2)
    config, count, lr = Lion(betas=(0.9, 0.99), weight_decay=0.1, clip_grad_norm=0.5), torch.tensor(8), 0.01

    def move(loss: float) -> list[list[torch.Tensor]]:
        scalars = (torch.tensor(loss), count, torch.tensor(lr))
        actual = lion_update(params, grads, moments, *scalars, treated=TREATED, config=config)
        return [actual.params, actual.exp_avg, [actual.grad_norm]]

    new_params, new_moments, (norm,) = move(1.0)
    averaged = [g / 8 for g in grads]
    whole = torch.cat([g.flatten() for g in averaged]).norm()
    torch.testing.assert_close(norm, whole)
    for p, g, m, new, moment, how in zip(params, averaged, moments, new_params, new_moments, TREATED, strict=True):
        g = g * min(1.0, 0.5 / float(whole))
        expected = p * (1 - lr * 0.1 if how.decay else 1.0) - lr * (0.9 * m + 0.1 * g).sign()
        torch.testing.assert_close(new, expected)
        torch.testing.assert_close(moment, 0.99 * m + 0.01 * g, rtol=1e-4, atol=1e-6)
    same, old, _ = move(float("nan"))
    assert all(map(torch.equal, same, params)) and all(map(torch.equal, old, moments))
