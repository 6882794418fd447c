"""Rows of one step, and the micro-batches of held-out rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepBatch:
    """Some rows of one step: for each field of the task a tensor [rows, ...], and for each row where it is from.

    `epoch` counts how often a text has started over.
    """

    tensors: Mapping[str, Tensor]
    origin: tuple[str, ...]
    epoch: int = 0

    def __getitem__(self, field: str) -> Tensor:
        return self.tensors[field]

    def rows(self, start: int, stop: int) -> StepBatch:
        """Rows start..stop of this batch, as a micro-batch."""
        part = slice(start, stop)
        return StepBatch({key: rows[part] for key, rows in self.tensors.items()}, self.origin[part], self.epoch)

    def micro_batches(self, blank: Mapping[str, Tensor], each: int, per_device: int) -> Iterator[StepBatch]:
        """The rows as micro-batches of `per_device`, filled up to `each` rows, and to whole micro-batches, by `blank`
        ones, which have no targets."""
        missing = -(-each // per_device) * per_device - len(self.origin)
        filled = {
            key: torch.cat([rows, blank[key].expand(missing, *rows.shape[1:])]) for key, rows in self.tensors.items()
        }
        batch = StepBatch(filled, (*self.origin, *[""] * missing), self.epoch)
        for start in range(0, each, per_device):
            yield batch.rows(start, start + per_device)
