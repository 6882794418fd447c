"""The mask of causal attention, and the capping of its scores."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


def visible(
    documents: tuple[Tensor, Tensor] | None, rows: range, keys: range, window: int | None, device: torch.device
) -> Tensor:
    """The attention mask, true where a row may attend to a key: [b or 1, 1, rows, keys] bool.

    A row attends to itself and to earlier positions. A `window` limits that to the last `window` positions, itself
    included. `documents`, the ids of the rows [b, rows] and of the keys [b, keys], limit it to the row's own document.
    """
    row = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    key = torch.arange(keys.start, keys.stop, device=device)
    mask = (key <= row).unsqueeze(0)
    if window is not None:
        mask = mask & (key > row - window)
    if documents is not None:
        mask = mask & (documents[0].unsqueeze(2) == documents[1].unsqueeze(1))
    return mask.unsqueeze(1)


@dataclass(frozen=True)
class CausalMask:
    """Which of the keys at the positions `keys` the queries at the positions `queries` attend to; see `visible`."""

    queries: range
    keys: range
    documents: tuple[Tensor, Tensor] | None = None
    """The ids of the queries [b, s] and of the keys [b, t]; one tensor where the positions are the same."""
    window: int | None = None

    def of(self, rows: slice, columns: slice, device: torch.device) -> Tensor:
        """The mask of some queries and some keys: [b or 1, 1, rows, columns] bool."""
        pair = None if self.documents is None else (self.documents[0][:, rows], self.documents[1][:, columns])
        return visible(pair, self.queries[rows], self.keys[columns], self.window, device)

    def until_last(self) -> CausalMask:
        """The same without the keys behind the last query, which none attends to."""
        t = max(0, min(len(self.keys), self.queries.stop - self.keys.start))
        if t == len(self.keys):
            return self
        documents = None if self.documents is None else (self.documents[0], self.documents[1][:, :t])
        return replace(self, keys=self.keys[:t], documents=documents)

    @property
    def ends_together(self) -> bool:
        """Whether the last query stands at the last key, and the first at one of the keys, so that each sees itself."""
        return self.keys.stop == self.queries.stop and self.keys.start <= self.queries.start

    @property
    def hides_no_position(self) -> bool:
        """Whether all keys stand before the first query, or at it, and within the last query's window."""
        within = self.window is None or self.queries.stop - 1 - self.window < self.keys.start
        return self.keys.stop <= self.queries.start + 1 and within

    @property
    def is_triangle(self) -> bool:
        """Whether each query sees itself and all earlier positions, of which the first is the first query's."""
        t = len(self.keys)
        return self.queries == self.keys and self.documents is None and (self.window is None or self.window >= t)


def last_of(s: int, t: int, documents: Tensor | None, window: int | None) -> CausalMask:
    """The mask of the last s of t positions. documents: the ids of all positions [b, t]."""
    pair = None if documents is None else (documents if s == t else documents[:, t - s :], documents)
    return CausalMask(range(t - s, t), range(t), pair, window)


def cap(scores: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(scores / softcap), in place; unchanged scores without a softcap."""
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def slopes(scores: Tensor, softcap: float | None) -> Tensor | float:
    """The derivative of `cap`, computed from its results `scores`."""
    return 1.0 if softcap is None else 1.0 - (scores / softcap).square()
