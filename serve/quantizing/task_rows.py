"""Rows of a task, on which a model is quantized or its loss measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tpshard.models.objectives.tasks import LanguageModel, Task


@dataclass(frozen=True)
class TaskRows:
    """Rows of a task."""

    batch: Mapping[str, Tensor]
    """The fields of the task, each [rows, ...]."""
    task: Task

    def split(self, rows: int) -> list[TaskRows]:
        """The rows in parts of at most `rows`."""
        parts = {name: tensor.split(rows) for name, tensor in self.batch.items()}
        count = len(next(iter(parts.values())))
        return [replace(self, batch={name: part[i] for name, part in parts.items()}) for i in range(count)]

    def to(self, device: torch.device | str) -> TaskRows:
        return replace(self, batch={name: tensor.to(device) for name, tensor in self.batch.items()})

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The arguments of the model's forward, real numbers in `dtype`."""
        return tuple(x.to(dtype) if x.is_floating_point() else x for x in self.task.inputs(self.batch))

    def loss(self, output: Tensor) -> tuple[float, int]:
        """(summed loss, number of targets) of the model's output."""
        total, count = self.task.loss(output, self.batch)
        return float(total), int(count)


def text_rows(
    tokens: Tensor, targets: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
) -> TaskRows:
    """Rows of text of which the next token is predicted, all [rows, seq] int64. Default: a document each."""
    batch = {
        "tokens": tokens,
        "targets": targets,
        "documents": torch.zeros_like(tokens) if documents is None else documents,
        "positions": torch.arange(tokens.shape[1]).expand_as(tokens) if positions is None else positions,
    }
    return TaskRows(batch, LanguageModel(tokens.shape[1]))
