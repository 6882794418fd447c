"""Training tasks with another loss than tpshard's, for plans of runs that others published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from tpshard.models.objectives.targets import IGNORE
from tpshard.models.objectives.tasks import LanguageModel


class _CrossEntropy(torch.autograd.Function):
    """`torch.nn.functional.cross_entropy` with the memory of its kernels, in the logits' own dtype.

    Only for plans: it also sums in that dtype. The log-probabilities are saved. The backward pass holds them, their
    gradient and the logits' gradient at once.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        counted = targets != IGNORE
        index = torch.where(counted, targets, 0).unsqueeze(-1)
        weight = counted.unsqueeze(-1).to(logits.dtype)
        shifted = logits - logits.amax(-1, keepdim=True)
        log_probabilities = shifted - torch.log(torch.exp(shifted).sum(-1, keepdim=True))
        ctx.save_for_backward(log_probabilities, index, weight)
        loss, count = -(log_probabilities.gather(-1, index) * weight).float().sum(), counted.sum()
        ctx.mark_non_differentiable(count)
        return loss, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None]:  # type: ignore[override]
        log_probabilities, index, weight = ctx.saved_tensors
        scale = weight * grad.to(weight.dtype)
        of_targets = torch.zeros_like(log_probabilities).scatter(-1, index, -scale)
        return torch.exp(log_probabilities) * scale + of_targets, None


class TorchCrossEntropy(LanguageModel):
    """Next-token prediction with torch's cross-entropy of logits in their own dtype."""

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return _CrossEntropy.apply(output, batch["targets"])


class TorchCrossEntropyFp32(TorchCrossEntropy):
    """Next-token prediction with torch's cross-entropy of logits that the model's caller casts to fp32."""

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return super().loss(output.float(), batch)
