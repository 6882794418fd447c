"""The interface between the training loop and the code that computes: forward, backward, update, and sharded state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from tpshard.train.generated_rows import StepBatch
from tpshard.train.shards import Shard

ReadBlock = Callable[[str, Sequence[int], Sequence[int]], Tensor]
"""A function (name, starts, sizes) -> that block of a global tensor, from a checkpoint or an initial value."""


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, the same on every rank."""

    losses: tuple[float, ...]
    """Loss of each micro-batch in nats per token, over all data ranks."""
    loss: float
    """Loss of the whole step, in nats per token."""
    targets: int
    """Target tokens."""
    grad_norm: float
    """Global norm of the gradients, before clipping."""
    finite: bool
    """False where loss or gradient was not finite; nothing was updated then."""
    counted: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The model's counters over the whole step and all data ranks, by path and label."""


class TrainingEngine(Protocol):
    """A model on this rank, with its optimizer."""

    @property
    def data_ranks(self) -> int:
        """The number of parts into which a step's sequences are divided."""
        ...

    @property
    def data_rank(self) -> int:
        """The number of this rank's part; ranks that share a part (tensor parallelism) read the same sequences."""
        ...

    @property
    def flops_per_sequence(self) -> int:
        """Floating-point operations of forward and backward for one sequence, over all devices; 0: unknown."""
        ...

    @property
    def exposed_comm_s(self) -> float | None:
        """Seconds that this rank waited for collectives since the last call; None: not measured."""
        ...

    @property
    def sent_bytes(self) -> int | None:
        """Bytes of the buffers of all collectives that this rank ran in one step; None: not counted yet."""
        ...

    @property
    def collectives(self) -> int | None:
        """Collectives of one step, counted as this rank issued them; None: not counted yet."""
        ...

    def accumulate(self, batch: StepBatch, seed: int) -> None:
        """Runs forward and backward of one micro-batch, and adds up gradients, loss and tokens.

        seed: for the random numbers that the model draws in this step.
        """
        ...

    def update(self, lr: float, number: int) -> StepResult:
        """Runs update number `number` (from 1) on the accumulated gradients, and resets them."""
        ...

    def evaluate(self, batch: StepBatch) -> tuple[float, int]:
        """(summed loss in nats, number of targets) of one micro-batch, over all data ranks."""
        ...

    def tensors(self) -> dict[str, Shard]:
        """This rank's blocks of parameters (by name) and moments (`optimizer/exp_avg/NAME`, ...)."""
        ...

    def stored_shapes(self) -> Mapping[str, tuple[Sequence[int], torch.dtype]]:
        """Global shape and dtype of every tensor of `tensors`, the same on every rank."""
        ...

    def load(self, read: ReadBlock) -> None:
        """Sets parameters and moments block by block."""
        ...

    def initialize(self, seed: int) -> None:
        """Sets parameters to their initial values (the same on every mesh) and moments to zero."""
        ...
