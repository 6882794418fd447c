"""The policy for a loss or gradient that is not finite, decided from numbers that are the same on all ranks."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tpshard.parallelism.runtime.context import Context
from tpshard.train.run.outcome import StepResult

logger = logging.getLogger(__name__)

Policy = Literal["stop", "skip", "rollback"]

MOST_SKIPS = 10
"""Consecutive skips after which the run, and not its data, is considered broken."""
MOST_ROLLBACKS = 3
"""Rollbacks to one checkpoint after which the run stops."""


class Guard:
    """Decides what to do after a non-finite step, by the recipe's policy and the skips and rollbacks so far."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.skipped_in_a_row = 0
        self.skipped = 0
        self._rollbacks: dict[int, int] = {}

    def fine(self) -> None:
        """Records a finite step."""
        self.skipped_in_a_row = 0

    def decide(self, back_to: int) -> tuple[Policy, str]:
        """Decides on a step that is not finite: (what to do, why if the run is to stop). `back_to`: the step that a
        rollback would return to.
        """
        if self.policy == "skip":
            self.skipped_in_a_row += 1
            self.skipped += 1
            if self.skipped_in_a_row > MOST_SKIPS:
                return "stop", f"{MOST_SKIPS} steps in a row were skipped already"
            return "skip", ""
        if self.policy == "rollback":
            self._rollbacks[back_to] = self._rollbacks.get(back_to, 0) + 1
            if self._rollbacks[back_to] > MOST_ROLLBACKS:
                return "stop", f"{MOST_ROLLBACKS} returns to step {back_to} did not help"
            return "rollback", ""
        return "stop", ""


def suspects(losses: Sequence[float]) -> list[int]:
    """The micro-batches that may be the cause: those whose loss is not finite, or all if only the gradient is not."""
    return [i for i, loss in enumerate(losses) if not math.isfinite(loss)] or list(range(len(losses)))


def number(value: float) -> float | None:
    """The value, or None where it is not finite: JSON has no NaN."""
    return value if math.isfinite(value) else None


def report(
    folder: Path, context: Context, step: int, result: StepResult, decision: Policy,
    origin: Sequence[Any], per_device: int, data_rank: int,
) -> Path:  # fmt: skip
    """Writes which text was in a non-finite step to a file of the run's folder, and returns its path. Every rank calls
    it. origin: of each row of this rank; per_device: rows of a micro-batch."""
    blamed = suspects(result.losses)
    rows = [row for i in blamed for row in origin[i * per_device : (i + 1) * per_device]]
    everyone = dict(context.gather((data_rank, rows)))
    path = folder / "logs" / "nonfinite.jsonl"
    if context.is_main:
        row = {
            "step": step, "loss": number(result.loss), "grad_norm": number(result.grad_norm),
            "decision": decision, "micro_batches": blamed, "time": time.time(),
            "batch": [origin for rank in sorted(everyone) for origin in everyone[rank]],
        }  # fmt: skip
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            logger.warning("%s cannot be written: %s", path, error)
    return path


def describe(loss: float, grad_norm: float) -> str:
    """Loss and gradient norm as text for a message."""
    return f"loss {loss:g}, gradient norm {grad_norm:g}"
