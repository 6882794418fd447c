"""Batches of generated data. A row depends on its number and the seed alone: any mesh and any resume give the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tpshard.models.loss import IGNORE
from tpshard.models.tasks import Task, held_out
from tpshard.recipes.diagnostic import Exit, Mistakes
from tpshard.recipes.schema import Recipe
from tpshard.train.stream import TokenBatch


@dataclass(frozen=True)
class GeneratedBatch:
    """Generated rows of one step, one tensor per field of the task; `origin` lists the rows' numbers in the run."""

    tensors: Mapping[str, Tensor]
    origin: tuple[str, ...]

    def tensor(self, field: str) -> Tensor:
        """One field, [rows, ...]."""
        return self.tensors[field]

    def rows(self, start: int, stop: int) -> GeneratedBatch:
        """Rows start..stop of this batch, as a micro-batch."""
        part = slice(start, stop)
        return GeneratedBatch({key: tensor[part] for key, tensor in self.tensors.items()}, self.origin[part])


StepBatch = TokenBatch | GeneratedBatch


class GeneratedRows:
    """Makes the batches of one data rank: rows `part` of every step. `train.stream.Loader` does the same for text."""

    def __init__(self, task: Task, recipe: Recipe, part: Sequence[int]):
        self.task, self.recipe, self.part, self.step = task, recipe, tuple(part), 0

    def next(self) -> GeneratedBatch:
        """This rank's rows of the next step."""
        first = self.step * self.recipe.batch.global_sequences
        self.step += 1
        return _draw(self.task, [first + row for row in self.part], self.recipe.seed)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, as JSON."""
        identity = {"global_sequences": self.recipe.batch.global_sequences, "tokenizer": self.recipe.task, "lanes": {}}
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
                fix="restore what has changed, or start a new run (checkpoint.resume: never, and another run.dir)",
            )  # fmt: skip
        self.step = int(state.get("step", 0))

    def close(self) -> None:
        """Does nothing: no file is open."""


def held_out_rows(
    task: Task, recipe: Recipe, numbers: Sequence[int], each: int, per_device: int
) -> Iterator[GeneratedBatch]:
    """Micro-batches of `each` held-out rows by their numbers; missing rows are padding without targets."""
    batch = _draw(task, [held_out(number) for number in numbers], recipe.seed)
    whole = -(-each // per_device) * per_device
    blank = {name: torch.zeros(field.shape, dtype=field.dtype) for name, field in task.fields.items()}
    blank["targets"] += IGNORE
    missing = whole - len(numbers)
    tensors = {
        key: torch.cat([tensor, blank[key].expand(missing, *blank[key].shape)])
        for key, tensor in batch.tensors.items()
    }  # fmt: skip
    filled = GeneratedBatch(tensors, (*batch.origin, *[""] * missing))
    for start in range(0, each, per_device):
        yield filled.rows(start, start + per_device)


def _draw(task: Task, numbers: Sequence[int], seed: int) -> GeneratedBatch:
    if not numbers:
        empty = {key: torch.zeros(0, *field.shape, dtype=field.dtype) for key, field in task.fields.items()}
        return GeneratedBatch(empty, ())
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
    return GeneratedBatch(tensors, tuple(f"row {number}" for number in numbers))
