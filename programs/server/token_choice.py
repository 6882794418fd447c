"""Choosing tokens from logits [rows, vocab] fp32, as functions of whole rows; each row's result depends on it alone.

`sampling_programs` partitions them where devices hold parts of the vocabulary. Probabilities are whole numbers, 2^40 of
the likeliest token's: their sums are exact in any order, so that a draw is the same on every mesh, in every batch and
on every device (it moves only if a probability's last bit does, of 40). `settings` are those of `picks.Picks`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WHOLE = 2.0**40
"""The weight of the likeliest token."""
SCORED = 2.0**44
"""Its weight in the sum of a log-probability, which is then right to 1e-8 whatever the vocabulary."""
CANDIDATES = 256
"""Likeliest tokens among which top-k and top-p look first."""
DIGIT = 8
"""Bits of a key that one round of `selected` finds."""


def likeliest(logits: Tensor, changed: Tensor) -> list[Tensor]:
    """Whether all logits of a row are finite [rows]; and the likeliest token [rows] of the changed ones."""
    return [logits.amax(-1).isfinite(), changed.argmax(-1)]


def drawn(logits: Tensor, settings: Tensor) -> list[Tensor]:
    """A token [rows] drawn from all that min-p leaves, in the order of their ids."""
    weights = _weigh(logits, _top(logits), settings)
    weights = weights * _likely(weights, settings)
    place = _place(settings, _sum(weights))
    return [(weights.cumsum(-1) <= place).sum(-1)]


def nucleus(logits: Tensor, settings: Tensor) -> list[Tensor]:
    """A token [rows] drawn from the top-k, of these from the smallest set that reaches top-p, of these from what min-p
    leaves; and whether the candidates sufficed [rows]: where not, `selected` has to draw.

    Of equally likely tokens those of smaller ids come first.
    """
    top, vocab, top_k = _top(logits), logits.shape[-1], settings[:, 1:2].long()
    total = _sum(_weigh(logits, top, settings))
    tokens, values = _best(logits, min(CANDIDATES, vocab))
    few = values.shape[-1]
    weights = _weigh(values, top, settings)
    weights = weights.where(torch.arange(few, device=logits.device) < top_k.where(top_k > 0, vocab), 0)
    sums = weights.cumsum(-1)
    total = total.where(top_k == 0, weights.sum(-1, keepdim=True))
    kept = (sums - weights < settings[:, 2:3] * total) & _likely(weights, settings) & (weights > 0)
    weights = weights.where(kept, 0)
    place = _place(settings, weights.sum(-1, keepdim=True))
    at = (weights.cumsum(-1) <= place).sum(-1, keepdim=True).clamp(max=few - 1)
    enough = ~kept[:, -1] & (top_k[:, 0] <= few) | (few == vocab)
    return [tokens.gather(-1, at)[:, 0], enough]


def selected(logits: Tensor, settings: Tensor) -> list[Tensor]:
    """What `nucleus` draws [rows], whatever the number of tokens it takes: found digit by digit of the logits' bits.

    A round adds the weights of the tokens of each next digit, which is all that devices tell each other.
    """
    vocab, top_k = logits.shape[-1], settings[:, 1:2].long()
    weights, keys = _weigh(logits, _top(logits), settings), _keys(logits)
    limit = top_k.where(top_k > 0, vocab).clamp(max=vocab)
    digits = [(keys >> shift) & (2**DIGIT - 1) for shift in range(32 - DIGIT, -1, -DIGIT)]
    least, above = _last(digits, torch.ones_like(keys), lambda before: before < limit)
    ties = limit - above
    total = _sum(weights * (keys > least)) + ties * _at(keys, least, weights)
    weights = weights * ((keys >= least) & _likely(weights, settings))

    share = settings[:, 2:3] * total
    last, above = _last(digits, weights, lambda before: (before.double() < share) | (before == 0))
    each, count = _at(keys, last, weights), _sum(keys == last)
    count = count.minimum(ties).where(last == least, count)
    tried = ((share - above.double()) / each.double()).ceil().long() + torch.arange(-2, 3, device=logits.device)
    kept = tried[:, :1] + ((above + tried * each).double() < share).sum(-1, keepdim=True)
    place = _place(settings, above + kept.clamp(min=1).minimum(count) * each)

    key, above = _last(digits, weights, lambda before: before <= place)
    behind = (place - above) // _at(keys, key, weights)
    return [((keys == key).cumsum(-1) <= behind).sum(-1)]


def scores(logits: Tensor, tokens: Tensor, count: int) -> list[Tensor]:
    """The model's log-probabilities in fp64: of the tokens [rows]; and the `count` likeliest tokens [rows, count], with
    theirs [rows, count]."""
    top = _top(logits)
    total = _sum(((logits.double() - top).exp() * SCORED).round().long())
    logsumexp = (total.double() / SCORED).log() + top
    best, values = _best(logits, min(count, logits.shape[-1]))
    own = logits.gather(1, tokens[:, None])
    return [(own.double() - logsumexp)[:, 0], best, values.double() - logsumexp]


def _top(logits: Tensor) -> Tensor:
    """The largest logit [rows, 1] in fp64."""
    return logits.amax(-1, keepdim=True).double()


def _best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens and their logits, both [rows, count]; equally likely ones by their ids."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    best = ((_keys(logits) << 31) + (2**31 - 1 - ids)).topk(count).values
    values = _mirrored(((best >> 31) - 2**31).int()).view(torch.float32)
    return 2**31 - 1 - (best & 0x7FFFFFFF), values


def _weigh(logits: Tensor, top: Tensor, settings: Tensor) -> Tensor:
    """Probabilities relative to the likeliest token's, as whole numbers."""
    # relative to the maximum: a temperature near zero gives 1 and 0, not inf - inf
    return (((logits.double() - top) / settings[:, :1]).exp() * WHOLE).long()


def _sum(weights: Tensor) -> Tensor:
    """The sum [rows, 1] of weights that are not negative, of which devices add the whole numbers."""
    return weights.sum(-1, keepdim=True).clamp(min=0)  # a clamp is not linear: it needs the sum of all devices


def _likely(weights: Tensor, settings: Tensor) -> Tensor:
    """Which weights min-p leaves."""
    return weights >= settings[:, 3:4] * WHOLE


def _place(settings: Tensor, total: Tensor) -> Tensor:
    """Where a draw falls among weights of this total [rows, 1]: the number before which as much weight lies."""
    return (settings[:, 4:5] * total).long().minimum(total - 1)


def _keys(logits: Tensor) -> Tensor:
    """Whole numbers of 32 bits in the order of the logits, equal where these are: [rows, vocab]."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 equals 0.0
    return _mirrored(bits).long() + 2**31


def _mirrored(bits: Tensor) -> Tensor:
    """The bits of fp32 numbers as whole numbers in the same order, and back: those of negative ones are turned."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _at(keys: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """The weight [rows, 1] of the tokens with a key."""
    return (weights * (keys == key)).amax(-1, keepdim=True)


def _last(digits: list[Tensor], weights: Tensor, within: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The least key [rows, 1] of a token with weight for which `within` holds of the weight of all larger keys; and
    this weight [rows, 1]. `within` holds up to some weight. digits: the keys' digits of `DIGIT` bits, highest first."""
    key = above = weights.new_zeros(len(weights), 1)
    for own in digits:
        sums = weights.new_zeros(len(weights), 2**DIGIT).scatter_add(1, own, weights)
        before = above + sums.sum(-1, keepdim=True) - sums.cumsum(-1)
        digit = (within(before) & (sums > 0)).long().argmax(-1, keepdim=True)
        key, above = (key << DIGIT) + digit, before.gather(1, digit)
        weights = weights * (own == digit)
    return key, above
