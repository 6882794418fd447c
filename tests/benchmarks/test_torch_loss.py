"""The loss of published runs has the values and gradients of torch's."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from tpshard.models.objectives.targets import IGNORE

from torch_loss import TorchCrossEntropy


def test_the_loss_is_torchs_cross_entropy() -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (2, 5))
    targets[1, 2:] = IGNORE
    loss, count = TorchCrossEntropy(5).loss(logits, {"targets": targets})
    (actual,) = torch.autograd.grad(loss, logits)
    summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORE)
    (expected,) = torch.autograd.grad(summed, logits)
    assert count == 7 and torch.isclose(loss, summed.float())
    assert torch.allclose(actual, expected, rtol=1e-6, atol=1e-6)
