"""The mask of causal attention, and the capping of its scores."""

from __future__ import annotations

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


def cap(scores: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(scores / softcap), in place; unchanged scores without a softcap."""
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def slopes(scores: Tensor, softcap: float | None) -> Tensor | float:
    """The derivative of `cap`, computed from its results `scores`."""
    return 1.0 if softcap is None else 1.0 - (scores / softcap).square()
