"""Dispatch of tokens to groups of experts by slots, with nothing dropped.

Neighbouring experts form groups, of which a device that holds experts has one. A token is copied once to each group
that has some of its experts, into one of the group's slots for its sequence, and the group returns the sum over these
experts. Where groups are sharded like experts, this is an all-to-all each way. Choices of tokens for which a group has
no slot left are computed in the same step as without slots, by one operation over all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tpshard.kernels.experts.experts import experts
from tpshard.kernels.experts.slots import from_slots, to_slots
from tpshard.models.dims import name
from tpshard.models.families.routing import Routes


@dataclass(frozen=True)
class ExpertGroups:
    """The groups of experts of each layer, and the room that they have for tokens."""

    count: int
    """Groups of equally many experts."""
    slack: float
    """The slots of a group for a sequence, as a multiple of the tokens that even routing sends there."""

    def slots(self, tokens: int, experts: int, top_k: int) -> int:
        """The slots of a group for a sequence of `tokens` tokens."""
        elsewhere = math.comb(experts - experts // self.count, top_k) / math.comb(experts, top_k)
        return min(tokens, math.ceil(self.slack * (1 - elsewhere) * tokens))


def group_slots(routes: Routes, groups: int, size: int) -> tuple[Tensor, Tensor]:
    """The slot of each token for each of its experts, and whether the expert's group has none: [batch, seq, top_k].

    Group g has the slots [g * size, (g + 1) * size) of each sequence, which earlier tokens get before later ones. Of a
    token's experts in a group the first one has the slot, the others have -1.
    """
    of_group = routes.chosen.unflatten(-1, (groups, -1)).sum(-1)  # [batch, seq, top_k, group]
    place = of_group.amax(2).cumsum(1) - 1  # of a token among those of its sequence for a group
    place = (place.unsqueeze(2) * of_group).sum(-1).long()
    again = ((of_group.cumsum(2) - of_group) * of_group).sum(-1) > 0
    group = routes.ids // (routes.chosen.shape[-1] // groups)
    return torch.where((place < size) & ~again, group * size + place, -1), place >= size


def by_groups(x: Tensor, routes: Routes, matrices: Sequence[Tensor], groups: ExpertGroups) -> tuple[Tensor, Tensor]:
    """The sum over each token's experts [batch, seq, embed], and how many choices found no slot.

    x: [batch, seq, embed]. matrices: gate, up [expert, mlp, embed] and down [expert, embed, mlp].
    """
    (_, tokens, _), (experts_in_all, *_) = x.shape, matrices[0].shape
    size = groups.slots(tokens, experts_in_all, routes.ids.shape[-1])
    slot_of, left = group_slots(routes, groups.count, size)

    def sent(value: Tensor, label: str, dim: str) -> Tensor:
        inside = to_slots(value, slot_of, groups.count * size).unflatten(1, (-1, size)).transpose(0, 1)
        return name(inside, label, "expert", "group", "slot", dim)

    inside = sent(x, "dispatched", "embed")
    weights = sent(routes.weights, "dispatched_weights", "choice")
    first = torch.arange(groups.count, device=x.device).view(-1, 1, 1, 1) * (experts_in_all // groups.count)
    ids = sent(routes.ids + 1, "dispatched_ids", "choice") - 1 - first  # -1 and below in empty slots
    grouped = (one.unflatten(0, (groups.count, -1)) for one in matrices)
    out = experts(inside, ids, weights, *grouped, used=min(1.0, tokens / (groups.count * size)))  # type: ignore[misc]
    out = name(out, "computed", "expert", "group", "slot", "embed")
    y, missed = from_slots(out.transpose(0, 1).flatten(1, 2), slot_of), left.float().sum()
    return (y if size == tokens else y + _without_slots(x, routes, matrices, left, missed)), missed


def _without_slots(x: Tensor, routes: Routes, matrices: Sequence[Tensor], left: Tensor, missed: Tensor) -> Tensor:
    """What the experts of choices without a slot add; nothing is computed or sent where there are none."""

    def some(*operands: Tensor) -> Tensor:
        return experts(*operands)  # type: ignore[arg-type]

    def none(x: Tensor, *_: Tensor) -> Tensor:
        return torch.zeros_like(x)

    # so that it has no price (see `parallelism.tracing.bodies`)
    some.rare = True  # type: ignore[attr-defined]
    operands = (x, torch.where(left, routes.ids, -1), routes.weights, *matrices)
    return torch.cond(missed > 0, some, none, operands)  # type: ignore[no-any-return]
