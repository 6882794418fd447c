"""Choosing tokens from logits, on the devices that have them. Each row's token depends on nothing but the row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tpshard.parallelism.runtime.context import put
from tpshard.programs.server.sampling_programs import Choice
from tpshard.programs.server.token_choice import drawn, likeliest, nucleus, scores, selected
from tpshard.serve.engine.picks import ANSWERED, BIAS, CHOOSE, RESET, SEEN, Picked, Picks

LIKELIEST = 20
"""Likeliest tokens that are found if any log-probability is asked for."""


CHANGES = -1
"""The table of the tokens whose logits change, beside those of what is told."""
Choosing = Callable[..., list[Tensor]]
"""A function (choice, tensors by rows, arguments by name) -> the results of a function of `token_choice`."""


def alone(choice: Choice, *tensors: Tensor, **static: Any) -> list[Tensor]:
    """The `Choosing` of a device that has the whole vocabulary; on a CPU row by row, since a row fits its cache."""
    if tensors[0].device.type != "cpu" or len(tensors[0]) == 1:
        return choice(*tensors, **static)
    rows = [choice(*row, **static) for row in zip(*(tensor.split(1) for tensor in tensors))]
    return [torch.cat(parts) for parts in zip(*rows)]


class Recalled:
    """What a device was told of the tokens of sequences, by slot; for its part of the vocabulary.

    first, vocab: the first token of the part, and their number. slots: the number of slots. A table [slots, vocab] is
    made when something is told that it holds.
    """

    def __init__(self, first: int, vocab: int, slots: int, device: torch.device) -> None:
        self._first, self._shape, self._device = first, (slots, vocab), device
        self._tables: dict[int, Tensor] = {}

    @property
    def vocab(self) -> int:
        """The tokens of this device's part."""
        return self._shape[1]

    def recall(self, news: np.ndarray) -> None:
        """Takes in what a step tells (`Picks.told`)."""
        if not len(news):
            return
        kinds = news[:, 1]
        fresh = brought(news[kinds == RESET, 0].astype(np.int64), self._device)
        for table in self._tables.values():
            table[fresh] = 0
        for kind, dtype in ((SEEN, torch.bool), (ANSWERED, torch.int32), (BIAS, torch.float64)):
            facts = news[kinds == kind]
            slots, tokens, at = self._places(facts[:, 0], facts[:, 2])
            if not len(slots):
                continue
            values = brought(facts[at, 3], self._device).to(dtype) if kind == BIAS else slots.new_ones((), dtype=dtype)
            self._table(kind, dtype).index_put_((slots, tokens), values, accumulate=kind != SEEN)
            self._table(CHANGES, torch.bool)[slots, tokens] = True

    def change(self, logits: Tensor, picks: Picks) -> Tensor:
        """The logits with penalties, biases and excluded tokens, as a new tensor where there are any.

        A positive logit is divided by the penalty for repetition, a negative one multiplied; summands come after.
        """
        if not len(picks.changed) and not len(picks.barred):
            return logits
        logits = logits.clone()
        if CHANGES in self._tables and len(picks.changed):
            numbers = brought(picks.changed, self._device)
            at, tokens = self._tables[CHANGES][numbers[:, 1].long()].nonzero(as_tuple=True)
            row, slot, repetition, presence, frequency = numbers[at].unbind(1)
            none = numbers.new_zeros(())
            seen, answered, bias = (
                self._tables[kind][slot.long(), tokens] if kind in self._tables else none
                for kind in (SEEN, ANSWERED, BIAS)
            )
            values, factor = logits[row.long(), tokens], repetition.float()
            scaled = torch.where(values > 0, values / factor, values * factor)
            values = torch.where((seen > 0) | (answered > 0), scaled, values)
            summand = bias - (presence * (answered > 0) + frequency * answered)
            logits[row.long(), tokens] = values + summand.float()
        if len(picks.barred):
            rows, tokens, _ = self._places(*picks.barred.T)
            logits[rows, tokens] = -torch.inf
        return logits

    def _table(self, kind: int, dtype: torch.dtype) -> Tensor:
        if kind not in self._tables:
            self._tables[kind] = torch.zeros(self._shape, dtype=dtype, device=self._device)
        return self._tables[kind]

    def _places(self, rows: np.ndarray, tokens: np.ndarray) -> tuple[Tensor, Tensor, np.ndarray]:
        """Rows and tokens that lie in this device's part, counted from its first, and which these are."""
        own = tokens - self._first
        at = (own >= 0) & (own < self._shape[1])
        here = brought(np.stack([rows[at], own[at]]).astype(np.int64), self._device)
        return here[0], here[1], at


def pick(logits: Tensor, picks: Picks, recalled: Recalled | None = None, choosing: Choosing = alone) -> Picked:
    """A token for each row of logits [rows, vocab] fp32, with the log-probabilities that are asked for.

    A row whose logits are not finite has any token. recalled: of the steps before; None: nothing was told before.
    choosing: how devices choose that each have a part of the vocabulary, which `logits` then is.
    """
    device, wanted, count = logits.device, picks.wanted, len(picks.wanted)
    if not count:
        return Picked(np.zeros((0, 3 + 2 * picks.most)))
    recalled = recalled or Recalled(0, logits.shape[-1], count, device)
    recalled.recall(picks.told)
    changed = recalled.change(logits, picks)
    sound, tokens = choosing(likeliest, logits, changed)
    for of_kind, restricted in _drawing(picks):
        settings = brought(picks.settings[of_kind], device)
        if len(of_kind) == count:
            tokens = _drawn(changed.where(sound[:, None], 0.0), settings, restricted, choosing)
        else:
            rows = brought(of_kind, device)
            chosen = changed[rows].where(sound[rows, None], 0.0)
            tokens[rows] = _drawn(chosen, settings, restricted, choosing)
    if (wanted[:, 0] >= 0).any():
        scored = brought(wanted[:, 0], device)
        tokens = tokens.where(scored < 0, scored)
    table = logits.new_zeros(count, 3 + 2 * picks.most, dtype=torch.float64)
    table[:, 0], table[:, 1] = sound, tokens
    asking = np.flatnonzero(wanted[:, 1] >= 0)
    if len(asking):
        rows = brought(asking, device)
        own, best, values = choosing(scores, logits[rows], tokens[rows], count=max(LIKELIEST, picks.most))
        found = min(picks.most, best.shape[-1])
        table[rows, 2], table[rows, 3 : 3 + found] = own, best[:, :found].double()
        table[rows, 3 + picks.most : 3 + picks.most + found] = values[:, :found]
    return Picked(table.cpu().numpy())


def _drawn(logits: Tensor, settings: Tensor, restricted: bool, choosing: Choosing) -> Tensor:
    """The tokens [rows] that are drawn, from all or, if `restricted`, from few."""
    if not restricted:
        (tokens,) = choosing(drawn, logits, settings)
        return tokens
    tokens, enough = choosing(nucleus, logits, settings)
    if not bool(enough.all()):
        more = ~enough
        (tokens[more],) = choosing(selected, logits[more], settings[more])
    return tokens


def brought(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy of the values on the device."""
    return put(torch.from_numpy(np.array(values)), device)


def _drawing(picks: Picks) -> list[tuple[np.ndarray, bool]]:
    """The rows that draw, from all tokens and from few: with top-k, or top-p below 1; and which of both they do."""
    s = picks.settings
    drawing, few = (picks.wanted[:, 0] == CHOOSE) & (s[:, 0] > 0), (s[:, 1] > 0) | (s[:, 2] < 1)
    kinds = ((np.flatnonzero(drawing & (few == restricted)), restricted) for restricted in (False, True))
    return [(rows, restricted) for rows, restricted in kinds if len(rows)]
