"""Dispatch of tokens to groups of experts by slots, with nothing dropped.

Neighbouring experts form groups, of which a device that holds experts has one. A token is copied once to each group
that has some of its experts, into one of the slots that the group has for the token's device, and the group returns the
sum over these experts. Where groups are sharded like experts, this is an all-to-all each way.

How many slots a step sends follows its own load, the most tokens that a device has for one group: devices agree on it
when tokens have been routed. Every step sends as many as even routing needs, and further ones in parts, each if the
load reaches it. Choices of tokens for which no slot is left are computed in the same step as without slots, by one
operation over all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tpshard.kernels.experts.experts import experts
from tpshard.kernels.experts.slots import from_slots, to_slots
from tpshard.models.dims import name
from tpshard.models.families.routing import Routes

PARTS = 2
"""The parts of the slots beyond those that every step sends."""


@dataclass(frozen=True)
class ExpertGroups:
    """The groups of experts of each layer, and the room that they have for tokens."""

    count: int
    """Groups of equally many experts."""
    slack: float
    """The most slots of a group, as a multiple of the tokens that even routing sends there."""
    shards: int = 1
    """The devices among which the sequences of a batch are divided; those of one device share its slots."""
    spread: float = 4.0
    """The slots that every step sends beyond the mean, in standard deviations of tokens that choose at random."""

    def slots(self, tokens: int, experts: int, top_k: int) -> list[int]:
        """The slots of a group for `tokens` tokens of a device: those that every step sends, and the further parts."""
        elsewhere = math.comb(experts - experts // self.count, top_k) / math.comb(experts, top_k)
        even = (1 - elsewhere) * tokens
        most = min(tokens, math.ceil(self.slack * even))
        always = min(most, math.ceil(even + self.spread * math.sqrt(even * elsewhere)))
        ends = [always + i * (most - always) // PARTS for i in range(PARTS + 1)]
        return [always, *(end - start for start, end in pairwise(ends) if end > start)]

    def pool(self, value: Tensor) -> Tensor:
        """The values of tokens with the sequences of a device joined to one: [batch, seq, ...] -> [shards, tokens, ...]

        Unchanged if the devices do not have equally many sequences.
        """
        if len(value) == self.shards or len(value) % self.shards:
            return value
        return value.unflatten(0, (self.shards, -1)).flatten(1, 2)


def by_groups(x: Tensor, routes: Routes, matrices: Sequence[Tensor], groups: ExpertGroups) -> tuple[Tensor, Tensor]:
    """The sum over each token's experts [batch, seq, embed], and how many choices found no slot.

    x: [batch, seq, embed]. matrices: gate, up [expert, mlp, embed] and down [expert, embed, mlp].
    """
    shape, x = x.shape, groups.pool(x)
    ids, weights, chosen = map(groups.pool, (routes.ids, routes.weights, routes.chosen))
    tokens, experts_in_all = x.shape[1], len(matrices[0])
    per_group = experts_in_all // groups.count
    sizes = groups.slots(tokens, experts_in_all, ids.shape[-1])
    place, is_first, load = _places(chosen, groups.count)
    parts, left = [], place >= sum(sizes)
    for start, size in zip(accumulate([0, *sizes]), sizes):
        mine = is_first & (place >= start) & (place < start + size)
        parts.append(_Part(start, size, torch.where(mine, ids // per_group * size + place - start, -1)))
    travel = _Travel(groups.count, tokens, load, parts)
    inside, inside_weights, inside_ids = travel.send(x, weights, ids + 1)  # 0, of an empty slot, is no expert
    first = torch.arange(groups.count, device=x.device).view(-1, 1, 1, 1) * per_group
    grouped = (one.unflatten(0, (groups.count, -1)) for one in matrices)
    used = min(1.0, tokens / (groups.count * sum(sizes)))
    out = experts(inside, inside_ids - 1 - first, inside_weights, *grouped, used=used)  # type: ignore[misc]
    y = travel.bring(out, x, torch.where(left, ids, -1), weights, *matrices)
    return y.view(shape), left.float().sum()


def _places(chosen: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The place of each token in the group of each of its experts, whether the expert is the first of these there
    [batch, seq, top_k], and the most tokens that a sequence has for a group, a scalar.

    A token's place is the number of earlier tokens of its sequence for the group.
    """
    of_group = chosen.unflatten(-1, (groups, -1)).sum(-1)  # [batch, seq, top_k, group]
    present = of_group.amax(2)
    place = ((present.cumsum(1) - 1).unsqueeze(2) * of_group).sum(-1).long()
    is_first = ((of_group.cumsum(2) - of_group) * of_group).sum(-1) == 0
    return place, is_first, present.sum(1).amax()


class _Part(NamedTuple):
    """Some slots of every group."""

    start: int
    """The place of the first token that has one of them."""
    size: int
    """Slots of a group for a sequence."""
    slot_of: Tensor
    """The slot of each token for each of its experts, [batch, seq, top_k]; -1: none of these."""


@dataclass(frozen=True)
class _Travel:
    """How tokens travel to slots and results back: to those of the first part, and if the load asks for it further."""

    groups: int
    tokens: int
    """Tokens of a sequence."""
    load: Tensor
    """The most tokens that a sequence has for a group, a scalar."""
    parts: Sequence[_Part]

    def send(self, *values: Tensor) -> list[Tensor]:
        """The tokens, the weights and the ids of their experts [batch, seq, dim], each in its slots on the devices of
        the groups [group, batch, slots, dim]. Empty slots have zeros."""
        (_, size, slot_of), further = self.parts[0], self.parts[1:]
        labels = (("dispatched", "embed"), ("dispatched_weights", "choice"), ("dispatched_ids", "choice"))
        slots = (to_slots(x, slot_of, self.groups * size).unflatten(1, (-1, size)).transpose(0, 1) for x in values)
        sent = [name(x, label, "expert", "group", "slot", dim) for x, (label, dim) in zip(slots, labels, strict=True)]
        if not further:
            return sent
        shape = self.groups, len(slot_of), sum(part.size for part in further)

        def none(*values: Tensor) -> list[Tensor]:
            return [x.new_zeros((*shape, x.shape[-1])) for x in values]

        rest = self._beyond(replace(self, parts=further).send, none, values)
        return [torch.cat(pair, 2) for pair in zip(sent, rest, strict=True)]

    def bring(self, out: Tensor, *operands: Tensor) -> Tensor:
        """For each token the sum of its slots in out [group, batch, slots, embed] and of choices that have none.

        operands: those of `experts` on all tokens, with the ids of choices without a slot alone.
        """
        (_, size, slot_of), further = self.parts[0], self.parts[1:]
        own = name(out[:, :, :size], "computed", "expert", "group", "slot", "embed")
        y = from_slots(own.transpose(0, 1).flatten(1, 2), slot_of)
        if not further and self._end == self.tokens:
            return y

        def rest(*operands: Tensor) -> Tensor:
            return replace(self, parts=further).bring(*operands) if further else experts(*operands)  # type: ignore[arg-type]

        if further:
            operands = (out[:, :, size:], *operands)
        return y + self._beyond(rest, lambda *_: torch.zeros_like(y), operands)

    @property
    def _end(self) -> int:
        return self.parts[0].start + self.parts[0].size

    def _beyond(self, some: Callable[..., Any], none: Callable[..., Any], operands: Sequence[Tensor]) -> Any:
        """What `some` computes if the load goes beyond the first part, else what `none` does."""

        def rare(*operands: Tensor) -> Any:
            return some(*operands)

        # so that it has no price (see `parallelism.tracing.bodies`)
        rare.rare = True  # type: ignore[attr-defined]
        return torch.cond(self.load > self._end, rare, none, tuple(operands))
