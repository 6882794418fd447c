"""The arrangement of a vectorized pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tpshard.diagnostics.diagnostic import plural
from tpshard.parallelism.pipeline.schedules import StageTask, Table


@dataclass(frozen=True)
class Stacking:
    """The arrangement of a vectorized pipeline: how layers are stacked, and in which order micro-batches pass them."""

    stages: int
    rounds: int
    per_stage: int
    """Layers of a stage in one round."""
    micro_batches: int
    path: str = "layers"
    """The path of the model's list of layers."""

    def __str__(self) -> str:
        rounds = f" x {self.rounds} rounds" if self.rounds > 1 else ""
        layers = f"{plural(self.per_stage, 'layer')}"
        return (
            f"{self.schedule}, vectorized, {self.stages} stages{rounds} of {layers}, {self.micro_batches} "
            f"micro-batches in {self.steps} steps: {100 * self.bubble:.1f}% bubble"
        )

    def to_json(self) -> dict[str, Any]:
        """The pipeline as the plan's JSON has it."""
        return {
            "schedule": self.schedule, "form": "vectorized", "devices": self.stages, "rounds": self.rounds,
            "micro_batches": self.micro_batches, "steps": self.steps, "bubble": round(self.bubble, 9),
            "split": [self.per_stage] * (self.stages * self.rounds),
        }  # fmt: skip

    @property
    def schedule(self) -> str:
        return "circular" if self.rounds > 1 else "gpipe"

    @property
    def steps(self) -> int:
        """Steps of the pipeline until the last stage has finished the last micro-batch."""
        return self.micro_batches * self.rounds + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of the steps in which a stage computes what nothing reads."""
        return (self.stages - 1) / self.steps

    def layers(self, slot: int) -> list[int]:
        """The numbers of the layers that are stacked in one module, in the order of their stages."""
        turn, place = divmod(slot, self.per_stage)
        return [(turn * self.stages + stage) * self.per_stage + place for stage in range(self.stages)]

    def members(self, name: str) -> list[str] | None:
        """The parameters of single layers that are stacked as `name`, by stage; None for one outside of the layers."""
        if not name.startswith(f"{self.path}."):
            return None
        slot, _, parameter = name.removeprefix(f"{self.path}.").partition(".")
        return [f"{self.path}.{layer}.{parameter}" for layer in self.layers(int(slot))]

    def turn(self, time: int, stage: int) -> tuple[int, int] | None:
        """The (micro-batch, round) that a stage computes in a step; None where the pipeline fills or drains."""
        since = time - stage
        if not 0 <= since < self.micro_batches * self.rounds:
            return None
        group, within = divmod(since, self.stages * self.rounds)
        return group * self.stages + within % self.stages, within // self.stages

    def tasks(self) -> Iterator[tuple[int, int, StageTask]]:
        """Yields (step, stage, forward task) of all work but filling and draining, in order."""
        for time in range(self.steps):
            for stage in range(self.stages):
                turn = self.turn(time, stage)
                if turn is not None:
                    yield time, stage, StageTask("F", turn[1] * self.stages + stage, turn[0])

    @property
    def table(self) -> Table:
        """The schedule: all forward tasks, then the backward ones in reverse order."""
        rows: list[list[StageTask]] = [[] for _ in range(self.stages)]
        for _, stage, task in self.tasks():
            rows[stage].append(task)
        both = tuple((*row, *(task._replace(kind="B") for task in reversed(row))) for row in rows)
        return Table(self.schedule, self.stages, self.stages * self.rounds, self.micro_batches, both)
