"""Routing of tokens to experts, and the balancing of their load.

The router's logits become scores, and the best `top_k` experts are chosen. Load is balanced by an auxiliary loss
(Shazeer et al. 2017; Fedus et al. 2021) or by a bias used only to choose (Wang et al. 2024, "Auxiliary-loss-free load
balancing"). The loss is computed per sequence (DeepSeek-V3, 2024, section 2.1.2), so that it does not depend on how
sequences are divided among devices and micro-batches. Capacity follows GShard (Lepikhin et al. 2020).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.models.dims import declared, name
from tpshard.models.families.config import ModelConfig


@dataclass(frozen=True)
class Routes:
    """The routing of a batch of tokens."""

    ids: Tensor
    """[batch, seq, top_k] int64: each token's experts, the best first."""
    weights: Tensor
    """[batch, seq, top_k] fp32: the factors of these experts' results."""
    chosen: Tensor
    """[batch, seq, top_k, expert]: 1 for the experts of `ids`, fp32."""
    scores: Tensor
    """[batch, seq, expert] fp32: the scores of all experts."""


def route(x: Tensor, weight: Tensor, bias: Tensor | None, c: ModelConfig) -> Routes:
    """The routing of x [batch, seq, embed], in fp32. weight: [expert, embed]; bias: [expert], used only to choose."""
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
    """The number of slots of each expert for a sequence of `tokens` tokens: its capacity."""
    assert c.capacity is not None and c.top_k is not None and c.experts is not None
    return min(tokens, math.ceil(c.capacity * c.top_k * tokens / c.experts))


def slots(routes: Routes, size: int) -> Tensor:
    """The slot of each token for each of its experts, [batch, seq, top_k] int64; -1 for a dropped token.

    Expert e has the slots [e * size, (e + 1) * size) of each sequence. First choices come before second ones, and
    earlier tokens before later ones.
    """
    chosen = routes.chosen.transpose(1, 2)  # [batch, top_k, seq, expert]
    place = (chosen.flatten(1, 2).cumsum(1).unflatten(1, chosen.shape[1:3]) * chosen).sum(-1) - 1
    place = place.transpose(1, 2).long()
    return torch.where(place < size, routes.ids * size + place, -1)


class _Also(torch.autograd.Function):
    """The identity of x, whose backward pass also gives `value` a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grad, ctx.saved_tensors[0], None


def with_gradient(x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """x unchanged; in its backward pass `value` also receives `gradient`."""
    return _Also.apply(x, value, gradient)


_targets: ContextVar[Tensor | None] = ContextVar("targets", default=None)


@contextmanager
def weighed_by(targets: Tensor) -> Iterator[None]:
    """A context in which the auxiliary loss of each sequence is weighed by its targets: [batch], their numbers.

    A step divides its summed loss by all targets, so that the auxiliary loss keeps its weight where only some tokens,
    such as those of answers, have a target.
    """
    token = _targets.set(targets)
    try:
        yield
    finally:
        _targets.reset(token)


def sequence_loss(routes: Routes) -> Tensor:
    """The auxiliary balancing loss, a scalar summed over sequences.

    For each sequence: its targets (`weighed_by`; without one its tokens), times experts * sum of (share of choices) *
    (mean share of scores), which is 1 where the load is even.
    """
    scores = routes.scores / (routes.scores.sum(-1, keepdim=True) + 1e-20)
    (_, tokens, top_k, experts), targets = routes.chosen.shape, _targets.get()
    share = routes.chosen.sum((1, 2)) * (experts / top_k)  # [batch, expert], for all tokens of a sequence
    of_sequence = (share * scores.mean(1)).sum(1)
    return (of_sequence if targets is None else of_sequence * (targets.float() / tokens)).sum()


def balance_steps(model: nn.Module) -> dict[str, float]:
    """The biases of experts by parameter name, with their step; their gradients are the experts' token counts.

    A module declares one as `balanced = {"bias": 0.001}`.
    """
    return declared(model, "balanced")
