"""Batches of generated data. A row depends on its number and the seed alone: any mesh and any resume give the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.objectives.targets import IGNORE
from tpshard.models.objectives.tasks import Task, held_out
from tpshard.recipes.keys.schema import Recipe
from tpshard.train.data.step_batch import StepBatch


class GeneratedRows:
    """Makes the batches of one data rank: rows `part` of every step. `train.stream.Loader` does the same for text."""

    def __init__(self, task: Task, recipe: Recipe, part: Sequence[int]):
        self.task, self.recipe, self.part, self.step = task, recipe, tuple(part), 0
        self.warnings: list[str] = []

    def next(self) -> StepBatch:
        """This rank's rows of the next step."""
        first = self.step * self.recipe.batch.global_sequences
        self.step += 1
        return drawn(self.task, [first + row for row in self.part], self.recipe.seed)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, as JSON."""
        identity = {
            "global_sequences": self.recipe.batch.global_sequences,
            "tokenizer": self.recipe.task,
            "sums": {},
            "lanes": {},
        }
        return {"step": self.step, **identity}

    def load_state_dict(self, state: Mapping[str, Any], *, force: bool = False) -> None:
        """Continues at the position `state`.

        Raises Mistakes (exit 6) if it is of another task or step size; with `force` it continues there anyway.
        """
        own_state = self.state_dict()
        changed = [key for key in ("global_sequences", "tokenizer") if state.get(key) != own_state[key]]
        if changed and not force:
            raise Mistakes.one(
                "the data cannot be resumed where the saved run stopped", exit=Exit.DATA,
                where=self.recipe.where("task"),
                why="; ".join(f"{state.get(key)!r} then, {own_state[key]!r} now" for key in changed),
                fix="restore what has changed; resume=force continues; run.dir=DIR starts another run",
            )  # fmt: skip
        self.step = int(state.get("step", 0))

    def close(self) -> None:
        """Does nothing: no file is open."""


def held_out_rows(
    task: Task, recipe: Recipe, numbers: Sequence[int], each: int, per_device: int
) -> Iterator[StepBatch]:
    """Micro-batches of `each` held-out rows by their numbers; missing rows are padding without targets."""
    batch = drawn(task, [held_out(number) for number in numbers], recipe.seed)
    blank = {name: torch.zeros(field.shape, dtype=field.dtype) for name, field in task.fields.items()}
    blank["targets"] += IGNORE
    yield from batch.micro_batches(blank, each, per_device)


def drawn(task: Task, numbers: Sequence[int], seed: int) -> StepBatch:
    """The rows with these numbers. Mistakes (exit 6) where they are not of the task's fields."""
    if not numbers:
        empty = {key: torch.zeros(0, *field.shape, dtype=field.dtype) for key, field in task.fields.items()}
        return StepBatch(empty, ())
    tensors = task.rows(numbers, seed)
    for name, field in task.fields.items():
        tensor = tensors.get(name)
        shape = (len(numbers), *field.shape)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != field.dtype:
            actual = "nothing" if tensor is None else f"{list(tensor.shape)} of {tensor.dtype}"
            raise Mistakes.one(
                f"the task's rows have {actual} in the field `{name}`",
                exit=Exit.DATA,
                why=f"the field is {list(shape)} of {field.dtype}",
                fix="correct `rows` of the task, or its `fields`",
            )
    return StepBatch(tensors, tuple(f"row {number}" for number in numbers))
