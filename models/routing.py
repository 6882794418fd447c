"""Which experts compute which tokens, and how they come to get as many.

Scores are made of a router's logits, the best `top_k` are chosen. Balance is either an auxiliary loss (Shazeer et al.
2017; Fedus et al. 2021), taken sequence by sequence (DeepSeek-V3, 2024, section 2.1.2), so that it does not depend on
how a step's sequences are dealt to devices and micro-batches, or a bias that is added in choosing alone (Wang et al.
2024, "Auxiliary-loss-free load balancing"). Capacity is GShard's (Lepikhin et al. 2020).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.models.config import ModelConfig
from tpshard.models.dims import name


@dataclass(frozen=True)
class Routes:
    """Where tokens go."""

    ids: Tensor
    """[batch, seq, top_k] int64: each token's experts, the best first."""
    weights: Tensor
    """[batch, seq, top_k] fp32: what their results are multiplied by."""
    chosen: Tensor
    """[batch, seq, top_k, expert]: 1 for the experts of `ids`, fp32."""
    scores: Tensor
    """[batch, seq, expert] fp32"""


def route(x: Tensor, weight: Tensor, bias: Tensor | None, c: ModelConfig) -> Routes:
    """x: [batch, seq, embed]; weight: [expert, embed]; bias: [expert], added in choosing alone. In fp32."""
    logits = F.linear(x.float(), weight.float())
    scores = logits.softmax(-1) if c.routing == "softmax" else logits.sigmoid()
    scores = name(scores, "scores", "batch", "seq", "choice")
    assert c.top_k is not None
    ids = (scores if bias is None else scores + bias).detach().topk(c.top_k, -1).indices
    chosen = (ids.unsqueeze(-1) == torch.arange(weight.shape[0], device=x.device)).float()
    weights = (chosen * scores.unsqueeze(-2)).sum(-1)
    if c.norm_top_k:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routes(ids, weights * c.route_scale, chosen, scores)


def slots_of(tokens: int, c: ModelConfig) -> int:
    """How many tokens of a sequence of so many an expert takes."""
    assert c.capacity is not None and c.top_k is not None and c.experts is not None
    return min(tokens, math.ceil(c.capacity * c.top_k * tokens / c.experts))


def slots(routes: Routes, size: int) -> Tensor:
    """[batch, seq, top_k] int64: the slots that tokens take of their sequence's, of which each expert has `size` in a
    row; -1 for those that find none.

    First choices come before second ones, and earlier tokens before later ones.
    """
    chosen = routes.chosen.transpose(1, 2)  # [batch, top_k, seq, expert]
    place = (chosen.flatten(1, 2).cumsum(1).unflatten(1, chosen.shape[1:3]) * chosen).sum(-1) - 1
    place = place.transpose(1, 2).long()
    return torch.where(place < size, routes.ids * size + place, -1)


class _Also(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grad, ctx.saved_tensors[0], None


def with_gradient(x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """x itself; in the backward pass of whatever is computed from it, `value` gets `gradient` too."""
    return _Also.apply(x, value, gradient)


def sequence_loss(routes: Routes) -> Tensor:
    """Scalar, summed over tokens: for each sequence, experts * sum of (share of choices) * (mean share of scores),
    which is 1 where both are even, times its tokens."""
    scores = routes.scores / (routes.scores.sum(-1, keepdim=True) + 1e-20)
    experts, top_k = routes.chosen.shape[-1], routes.chosen.shape[-2]
    share = routes.chosen.sum((1, 2)) * (experts / top_k)  # [batch, expert], for all tokens of a sequence
    return (share * scores.mean(1)).sum()


def balanced(model: nn.Module) -> dict[str, float]:
    """Parameters that are no weights but the biases of experts, and the steps that they go. Their gradients are how
    many tokens each expert got. A module tells by `balanced = {"bias": 0.001}`."""
    found = {}
    for path, module in model.named_modules():
        for local, rate in getattr(module, "balanced", {}).items():
            found[f"{path}.{local}" if path else local] = float(rate)
    return found
