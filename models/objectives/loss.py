"""Cross-entropy that works on logits sharded over the vocabulary, without gathering a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORE = -100
"""The target of a position where nothing is predicted."""


class _CrossEntropySum(torch.autograd.Function):
    """Cross-entropy with three reductions over the vocabulary forward (maximum, sum of exponentials, target's logit).

    Its backward pass has none. Autograd's formula for log-softmax would reduce once more there, which costs a
    collective where the vocabulary is sharded.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = logits.float()
        counted = targets != IGNORE
        index = torch.where(counted, targets, 0).unsqueeze(-1)
        highest = x.amax(-1, keepdim=True)
        log_sum = torch.log(torch.exp(x - highest).sum(-1, keepdim=True)) + highest
        weight = counted.unsqueeze(-1).to(torch.float32)
        loss = ((log_sum - x.gather(-1, index)) * weight).sum()
        count = counted.sum()
        ctx.save_for_backward(logits, log_sum, index, weight)
        ctx.mark_non_differentiable(count)
        return loss, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, log_sum, index, weight = ctx.saved_tensors
        scale = weight * grad
        softmax = torch.exp(logits.float() - log_sum)
        return (softmax * scale).scatter_add(-1, index, -scale).to(logits.dtype), None


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy in nats, in fp32, and the number of targets in the sum.

    logits: [batch, seq, vocab]; targets: [batch, seq] int64, IGNORE for positions without a target
    -> (fp32 scalar, int64 scalar)
    """
    return _CrossEntropySum.apply(logits, targets)
