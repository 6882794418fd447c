"""What the loop asks of whatever computes: forward and backward passes, updates, and its state in shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from tpshard.train.made import StepBatch
from tpshard.train.shards import Shard

ReadBlock = Callable[[str, Sequence[int], Sequence[int]], Tensor]
"""(name, starts, sizes) -> that block of the global tensor: a checkpoint's, or the initial value."""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same on every rank."""

    losses: tuple[float, ...]
    """Loss of each micro-batch, nats a token; over all data ranks."""
    loss: float
    """Over the whole step, nats a token."""
    targets: int
    """Tokens that were predicted."""
    grad_norm: float
    """Before clipping."""
    finite: bool
    """False where loss or gradient was not finite; then nothing was updated."""
    counted: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """What the model's modules counted in the whole step, over all data ranks, by path and label."""


class TrainingEngine(Protocol):
    """A model on this rank, with its optimizer."""

    @property
    def data_ranks(self) -> int:
        """Parts that a step's sequences are dealt to."""
        ...

    @property
    def data_rank(self) -> int:
        """Which part is this rank's; ranks that share a part (tensor parallelism) read the same sequences."""
        ...

    @property
    def flops_per_sequence(self) -> int:
        """Floating-point operations of forward and backward for one sequence, all devices together; 0: unknown."""
        ...

    @property
    def exposed_comm_s(self) -> float | None:
        """Seconds that this rank waited for collectives since it was last asked; None: not measured."""
        ...

    @property
    def sent_bytes(self) -> int | None:
        """Bytes of the buffers of all collectives of one step, counted as this rank ran it; None: not counted yet."""
        ...

    @property
    def collectives(self) -> int | None:
        """Collectives of one step, counted as this rank issued them; None: not counted yet."""
        ...

    def accumulate(self, batch: StepBatch, seed: int) -> None:
        """Forward and backward of one micro-batch: adds to the gradients and to the sums of loss and tokens. `seed`: of
        the random numbers that the model draws in this step."""
        ...

    def update(self, lr: float, number: int) -> StepResult:
        """The `number`-th update (from 1) with what was accumulated, which is forgotten."""
        ...

    def evaluate(self, batch: StepBatch) -> tuple[float, int]:
        """Summed loss in nats and number of targets of one micro-batch, over all data ranks."""
        ...

    def tensors(self) -> dict[str, Shard]:
        """This rank's blocks of parameters (by name) and moments (`optimizer/exp_avg/NAME`, ...)."""
        ...

    def expected(self) -> Mapping[str, tuple[Sequence[int], torch.dtype]]:
        """Global shape and dtype of every tensor of `tensors`, the same on every rank."""
        ...

    def load(self, read: ReadBlock) -> None:
        """Fills parameters and moments block by block."""
        ...

    def initialize(self, seed: int) -> None:
        """Initial parameters (the same values on every mesh) and zero moments."""
        ...
