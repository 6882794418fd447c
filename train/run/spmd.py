"""The training engine without stages: every rank runs the same programs on its shards."""

from __future__ import annotations

import torch
from torch import Tensor
from tpshard.parallelism.runtime.context import Context
from tpshard.programs.step.training import TrainingPrograms
from tpshard.train.data.step_batch import StepBatch
from tpshard.train.run.training_engine import EVALUATION, InitialBlock, StepResult, TrainingEngine


class SpmdEngine(TrainingEngine):
    """An engine whose ranks all run the same programs."""

    def __init__(
        self, programs: TrainingPrograms, context: Context, initial_block: InitialBlock, trains: bool = True
    ):  # fmt: skip
        sums = [port for port in programs.micro.inputs if port.kind == "gradient"]
        super().__init__(programs, context, initial_block, programs.stored, programs.update, sums, trains)
        self.micro, self.step, self.evaluation = (
            self._executor(program, compiled=self.compiled)
            for program in (programs.micro, programs.update, programs.evaluate)
        )
        self.gather, self.reduce = (
            self._executor(program) if program is not None else None for program in (programs.gather, programs.reduce)
        )
        self.evaluation.part = EVALUATION
        parts = {"micro-batch": self.micro, "update": self.step, "gather": self.gather, "reduce": self.reduce}
        for name, executor in parts.items():
            if executor is not None:
                executor.part = name
        self._sums: list[tuple[Tensor, Tensor]] = []
        self._counts: list[Tensor] = []
        self._used: list[Tensor] | None = None
        """Parameters gathered once for all micro-batches of the step; None before."""

    def accumulate(self, batch: StepBatch, seed: int) -> None:
        with self._counting():
            if self.gather is not None and self._used is None:
                self._used = self.gather(*self.params)
            params = self.params if self._used is None else self._used
            loss, count, *rest = self.micro(
                *params, *self.sums, *self._local(batch, self.micro.program, seed, len(self._sums))
            )
        self.sums, counted = rest[: len(self.sums)], rest[len(self.sums) :]
        self._sums.append((loss, count))
        self._counts += counted

    def update(self, lr: float, number: int) -> StepResult:
        losses = torch.stack([loss for loss, _ in self._sums])
        counts = torch.stack([count for _, count in self._sums])
        scalars = (losses.sum(), counts.sum(), self._scalar(lr), self._scalar(number))
        with self._counting():
            sums = self.sums if self.reduce is None else self.reduce(*self.sums)
            self._used = None
            results = self.step(*self.trained, *sums, *self.moments, *scalars)
        norm, finite = self._store_update(results)
        counted = torch.stack(self._counts).sum(0) if self._counts else None
        self._sums.clear()
        self._counts.clear()
        return self._result(losses, counts, norm, finite, counted)

    def evaluate(self, batch: StepBatch) -> tuple[float, int]:
        loss, count = self.evaluation(*self.params, *self._local(batch, self.evaluation.program, 0, 0))
        return float(loss), int(count)
