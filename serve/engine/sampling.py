"""Choosing tokens from logits, on the device that has them. Each row's token depends on nothing but the row.

Probabilities are whole numbers, 2^40 of the likeliest token's: their sums are exact in any order, so that a draw is the
same in every batch and on every device (it moves only if a probability's last bit does, of 40).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from tpshard.serve.engine.picks import CHOOSE, Picked, Picks

WHOLE = 2.0**40
"""The weight of the likeliest token."""
CANDIDATES = 1024
"""Likeliest tokens among which top-k and top-p look first; where they do not suffice, all tokens are sorted."""


def pick(logits: Tensor, picks: Picks) -> Picked:
    """A token for each row of logits [rows, vocab] fp32, with the log-probabilities that are asked for.

    A row whose logits are not finite has any token.
    """
    device, wanted = logits.device, picks.wanted
    sound = logits.amax(-1).isfinite()
    changed = change(logits, picks.changes)
    tokens = changed.argmax(-1)
    drawing = np.flatnonzero((wanted[:, 0] == CHOOSE) & (picks.settings[:, 0] > 0))
    for restricted in (False, True):
        of_kind = drawing[_restricted(picks.settings[drawing]) == restricted]
        # one by one on a CPU: a row fits its cache
        for part in np.array_split(of_kind, len(of_kind) if device.type == "cpu" else 1) if len(of_kind) else ():
            rows = torch.from_numpy(part).to(device)
            chosen = changed[rows].where(sound[rows, None], 0.0)
            settings = torch.from_numpy(picks.settings[part]).to(device)
            tokens[rows] = _from_likeliest(chosen, settings) if restricted else _from_all(chosen, settings)
    scored = torch.from_numpy(np.array(wanted[:, 0])).to(device)
    tokens = tokens.where(scored < 0, scored)
    table = logits.new_zeros(len(wanted), 3 + 2 * picks.most, dtype=torch.float64)
    table[:, 0], table[:, 1] = sound, tokens
    asking = np.flatnonzero(wanted[:, 1] >= 0)
    if len(asking):
        rows = torch.from_numpy(asking).to(device)
        logprobs = torch.log_softmax(logits[rows].double(), -1)
        values, likeliest = logprobs.topk(min(picks.most, logits.shape[-1]))
        more = picks.most - likeliest.shape[-1]
        likeliest, values = (torch.nn.functional.pad(x, (0, more)) for x in (likeliest.double(), values))
        table[rows, 2:] = torch.cat([logprobs.gather(1, tokens[rows, None]), likeliest, values], 1)
    return Picked(table.cpu().numpy())


def change(logits: Tensor, changes: np.ndarray) -> Tensor:
    """The logits with penalties, biases and excluded tokens, as a new tensor where there are any (`Picks.changes`)."""
    changes = changes[changes[:, 1] < logits.shape[-1]]
    for column, neutral in ((2, 1.0), (3, 0.0)):
        own = changes[changes[:, column] != neutral]
        if not len(own):
            continue
        logits = logits.clone()
        rows, tokens = torch.from_numpy(own[:, :2].astype(np.int64).T.copy()).to(logits.device)
        amount = torch.from_numpy(own[:, column].astype(np.float32)).to(logits.device)
        values = logits[rows, tokens]
        scaled = torch.where(values > 0, values / amount, values * amount) if column == 2 else values + amount
        logits[rows, tokens] = scaled
    return logits


def _restricted(settings: np.ndarray) -> np.ndarray:
    """Which rows draw from few tokens: with top-k, or top-p below 1."""
    return (settings[:, 1] > 0) | (settings[:, 2] < 1)  # type: ignore[no-any-return]


def _weights(logits: Tensor, settings: Tensor) -> Tensor:
    """Probabilities relative to the likeliest token's, as whole numbers [rows, vocab]."""
    logits = logits.double()
    # relative to the maximum: a temperature near zero gives 1 and 0, not inf - inf
    return (((logits - logits.amax(-1, keepdim=True)) / settings[:, :1]).exp_() * WHOLE).long()


def _at(weights: Tensor, settings: Tensor) -> Tensor:
    """The place [rows] in each row of weights where a draw falls."""
    sums = weights.cumsum(-1)
    total = sums[:, -1:]
    threshold = (settings[:, 4:] * total).long().minimum(total - 1)
    return torch.searchsorted(sums, threshold, right=True)[:, 0]


def _from_all(logits: Tensor, settings: Tensor) -> Tensor:
    """Tokens drawn from all that min-p leaves."""
    weights = _weights(logits, settings)
    return _at(weights.where(weights >= settings[:, 3:4] * WHOLE, 0), settings)


def _from_likeliest(logits: Tensor, settings: Tensor) -> Tensor:
    """Tokens drawn from the top-k, of these from the smallest set that reaches top-p, of these from what min-p leaves.

    Of equally likely tokens those of smaller ids come first.
    """
    weights = _weights(logits, settings)
    whole = logits.shape[-1]
    few = min(whole, max(CANDIDATES, int(settings[:, 1].max()) + 1))
    tokens, enough = _nucleus(logits, weights, settings, few)
    while few < whole and not bool(enough.all()):
        few, rows = min(whole, 8 * few), (~enough).nonzero()[:, 0]
        tokens[rows], enough[rows] = _nucleus(logits[rows], weights[rows], settings[rows], few)
    return tokens


def _nucleus(logits: Tensor, weights: Tensor, settings: Tensor, few: int) -> tuple[Tensor, Tensor]:
    """Tokens drawn as `_from_likeliest` says, from the `few` likeliest; and whether these were enough."""
    values, tokens = logits.topk(few)
    tokens, order = tokens.sort(-1)
    values, order = values.gather(-1, order).sort(stable=True, dim=-1, descending=True)
    tokens = tokens.gather(-1, order)
    top_k = settings[:, 1:2].long()
    limit = top_k.where(top_k > 0, logits.shape[-1])
    ordered = weights.gather(-1, tokens)
    ordered = ordered.where(torch.arange(few, device=logits.device) < limit, 0)
    sums = ordered.cumsum(-1)
    total = weights.sum(-1, keepdim=True).where(top_k == 0, sums[:, -1:])
    kept = (sums - ordered < settings[:, 2:3] * total) & (ordered >= settings[:, 3:4] * WHOLE) & (ordered > 0)
    last = kept.sum(-1, keepdim=True).clamp(min=1) - 1
    # the last candidate may share its value with a token that is none
    enough = values.gather(-1, last) > values[:, -1:]
    return tokens.gather(-1, _at(ordered.where(kept, 0), settings)[:, None])[:, 0], enough[:, 0]
