"""Cross-entropy that works on logits sharded over the vocabulary, without gathering a row, whole or in chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.models.objectives.chunked_head import Unprojected
from tpshard.models.objectives.targets import IGNORE


class LossTerms(NamedTuple):
    """What training adds to the cross-entropy of a target."""

    label_smoothing: float = 0.0
    """The share e of a target that all of the vocabulary has alike: (1 - e) x its loss + e x the mean of all tokens'
    (Szegedy et al. 2016)."""
    z_loss: float = 0.0
    """Times the squared logarithm of the sum of exponentials, which stays near 0 (PaLM, Chowdhery et al. 2022)."""


PLAIN = LossTerms()


class _CrossEntropySum(torch.autograd.Function):
    """Cross-entropy with three reductions over the vocabulary forward (maximum, sum of exponentials, target's logit).

    Its backward pass has none. Autograd's formula for log-softmax would reduce once more there, which costs a
    collective where the vocabulary is sharded.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor]:
        x = logits.float()
        counted = targets != IGNORE
        index = torch.where(counted, targets, 0).unsqueeze(-1)
        highest = x.amax(-1, keepdim=True)
        log_sum = torch.log(torch.exp(x - highest).sum(-1, keepdim=True)) + highest
        weight = counted.unsqueeze(-1).to(torch.float32)
        likely = x.gather(-1, index)
        if share := terms.label_smoothing:
            likely = likely * (1 - share) + x.sum(-1, keepdim=True) * (share / x.shape[-1])
        each = log_sum - likely
        if terms.z_loss:
            each = each + log_sum * log_sum * terms.z_loss
        loss, ctx.terms = (each * weight).sum(), terms
        count = counted.sum()
        ctx.save_for_backward(logits, log_sum, index, weight)
        ctx.mark_non_differentiable(count)
        return loss, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits, log_sum, index, weight = ctx.saved_tensors
        share, z_loss = ctx.terms
        scale = weight * grad
        softmax = torch.exp(logits.float() - log_sum)
        own = softmax * (scale * (1 + 2 * z_loss * log_sum) if z_loss else scale)
        if share:
            own = own - scale * (share / logits.shape[-1])
        return own.scatter_add(-1, index, scale * (share - 1) if share else -scale).to(logits.dtype), None, None


class _ChunkedCrossEntropySum(torch.autograd.Function):
    """Cross-entropy of a head's product, and the gradients of the head's input and parameters, a chunk at a time.

    The gradients are computed in the forward pass, as in Liger Kernel (Hsu et al. 2024, section 3.2), so that a chunk's
    logits are computed once and held while the chunk is. A chunk is every n-th token: a shard of the sequence holds as
    many tokens of each chunk, and none moves.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunks: int, terms: LossTerms
    ) -> tuple[Tensor, Tensor]:
        split = (targets.shape[1] // chunks, chunks)
        parts, labels = hidden.unflatten(1, split), targets.unflatten(1, split)
        one = hidden.new_ones((), dtype=torch.float32)
        inputs: list[Tensor] = []
        sums: dict[str, Tensor] = {}  # added up as they come: those of all chunks would be as large as the logits

        def add(name: str, value: Tensor) -> None:
            sums[name] = sums[name] + value if name in sums else value

        for i in range(chunks):
            x, each = parts.select(2, i), SimpleNamespace()
            each.save_for_backward = lambda *saved, each=each: setattr(each, "saved_tensors", saved)
            each.mark_non_differentiable = lambda _: None
            loss, count = _CrossEntropySum.forward(each, F.linear(x, weight, bias), labels.select(2, i), terms)
            grad, *_ = _CrossEntropySum.backward(each, one, None)
            add("loss", loss)
            add("count", count)
            inputs.append(grad @ weight)
            if ctx.needs_input_grad[1]:
                add("weight", grad.flatten(0, 1).t() @ x.flatten(0, 1))
            if bias is not None:
                add("bias", grad.sum((0, 1)))
        ctx.save_for_backward(torch.stack(inputs, 2).flatten(1, 2), sums.get("weight"), sums.get("bias"))
        ctx.mark_non_differentiable(sums["count"])
        return sums["loss"], sums["count"]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *(None if each is None else (each * grad).to(each.dtype) for each in ctx.saved_tensors), None, None, None


def cross_entropy_sum(logits: Tensor | Unprojected, targets: Tensor, terms: LossTerms = PLAIN) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy in nats with these terms, in fp32, and the number of targets in the sum.

    logits: [batch, seq, vocab], or what they are computed from; targets: [batch, seq] int64, IGNORE for positions
    without a target -> (fp32 scalar, int64 scalar). ValueError for a sequence that the chunks do not divide.
    """
    if not isinstance(logits, Unprojected):
        return _CrossEntropySum.apply(logits, targets, terms)
    return _ChunkedCrossEntropySum.apply(logits.hidden, logits.weight, logits.bias, targets, logits.chunks, terms)
