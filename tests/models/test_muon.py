"""Muon moves matrices as torch's own does, and other parameters as AdamW."""

from __future__ import annotations

import pytest
import torch
from tpshard.models.optimizers.adamw import AdamW, Treatment, adamw_update
from tpshard.models.optimizers.muon import Muon, muon_update, orthogonalize

ADAMW = AdamW(weight_decay=0.1, clip_grad_norm=None)
SHAPES = ((8, 12), (5,), (12, 8), (8, 12), (3, 6, 4))
TREATED = [Treatment(decay=len(shape) > 1, orthogonal=len(shape) > 1) for shape in SHAPES]


def tensors(seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random) for shape in SHAPES]


def scalars(update: int, loss: float = 1.0) -> list[torch.Tensor]:
    return [torch.tensor(loss), torch.tensor(4), torch.tensor(0.01), torch.tensor(float(update))]


def test_matrices_move_as_torchs_muon_moves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)  # both iterate in float64, free of rounding
    params, moments, squares = tensors(0), [torch.zeros(shape) for shape in SHAPES], [torch.zeros(5)]
    matrices = [
        [torch.nn.Parameter(one.clone()) for one in (p if p.dim() == 3 else [p])] for p in params if p.dim() > 1
    ]
    peer = torch.optim.Muon(
        [one for group in matrices for one in group], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for update in (1, 2, 3):
        grads = tensors(update)
        done = muon_update(
            params, grads, moments, squares, *scalars(update), treated=TREATED, config=Muon(ADAMW, dtype=torch.float64)
        )  # fmt: skip
        params, moments, squares = done.params, done.exp_avg, done.exp_avg_sq
        averaged = [g / 4 for g in grads if g.dim() > 1]
        for group, grad in zip(matrices, averaged, strict=True):
            for one, its in zip(group, grad if grad.dim() == 3 else [grad], strict=True):
                one.grad = its
        peer.step()
    for group, param in zip(matrices, [p for p in params if p.dim() > 1], strict=True):
        expected = torch.stack([one.detach() for one in group]) if param.dim() == 3 else group[0].detach()
        torch.testing.assert_close(param, expected, rtol=0, atol=1e-6)


def test_other_parameters_move_as_adamw_moves_them() -> None:
    params, grads, moments = tensors(0), tensors(1), tensors(2)
    squares = [tensors(3)[1].abs()]
    done = muon_update(params, grads, moments, squares, *scalars(2), treated=TREATED, config=Muon(ADAMW))
    alone = adamw_update(
        params[1:2], grads[1:2], moments[1:2], squares, *scalars(2), treated=[Treatment()], config=ADAMW
    )
    assert torch.equal(done.params[1], alone.params[0]) and torch.equal(done.exp_avg_sq[0], alone.exp_avg_sq[0])


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    params, moments, squares = tensors(0), tensors(1), [tensors(2)[1].abs()]
    done = muon_update(
        params, tensors(3), moments, squares, *scalars(1, float("nan")), treated=TREATED, config=Muon(ADAMW)
    )
    assert (
        not done.finite and all(map(torch.equal, done.params, params)) and all(map(torch.equal, done.exp_avg, moments))
    )


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (2, 24, 48)])
def test_singular_values_become_equal(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert values.min() > 0.65 and values.max() < 1.25  # the polynomial maps 0.1 to 1 between these
