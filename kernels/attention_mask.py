"""Who sees whom in causal attention, how scores are capped, and in which dtype it is computed."""

from __future__ import annotations

import torch
from torch import Tensor


def visible(
    documents: tuple[Tensor, Tensor] | None, rows: range, keys: range, window: int | None, device: torch.device
) -> Tensor:
    """Which of the positions `keys` the positions `rows` may see: [b or 1, 1, rows, keys] bool.

    A row sees itself and what is before it, with a `window` the last so many of these, itself included, and with
    `documents` (of the rows [b, rows] and of the keys [b, keys]) only its own.
    """
    row = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    key = torch.arange(keys.start, keys.stop, device=device)
    seen = (key <= row).unsqueeze(0)
    if window is not None:
        seen = seen & (key > row - window)
    if documents is not None:
        seen = seen & (documents[0].unsqueeze(2) == documents[1].unsqueeze(1))
    return seen.unsqueeze(1)


def wide(x: Tensor) -> torch.dtype:
    """The dtype in which attention to `x` is computed: fp64 for fp64, fp32 for all others."""
    return torch.promote_types(x.dtype, torch.float32)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores that stay within [-softcap, softcap], in place; as they are without one."""
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def slopes(scores: Tensor, softcap: float | None) -> Tensor | float:
    """The derivative of `capped`, by its results."""
    return 1.0 if softcap is None else 1.0 - (scores / softcap).square()
