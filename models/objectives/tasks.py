"""Training tasks: the tensors of a batch, the model's inputs among them, and the loss of its output.

A custom task is any class with the attributes of `Task`, named in a recipe as `task: package:Class` and constructed
with the recipe's `model.seq_len`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from tpshard.models.assemble import import_object
from tpshard.models.objectives.loss import PLAIN, LossTerms, cross_entropy_sum
from tpshard.models.objectives.targets import IGNORE

_HELD_OUT = 1 << 48
"""Rows with this number or above are held out for evaluation."""


class Field(NamedTuple):
    """One tensor of a batch, [rows, *shape]."""

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    """Names of its dims after the first, which is `batch`."""
    dtype: torch.dtype = torch.int64


class Task(Protocol):
    """The interface of a training task."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The tensors of a batch by name, in order. `targets` is int64, IGNORE where nothing is predicted."""
        ...

    @property
    def text(self) -> bool:
        """Whether the rows are text from the recipe's `data`; then `fields` are those of `LanguageModel`."""
        ...

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The arguments of the model's forward."""
        ...

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(summed loss fp32, number of targets int64) of the model's output."""
        ...

    def rows(self, numbers: Sequence[int], seed: int) -> dict[str, Tensor]:
        """The tensors of the rows with these numbers, a function of number and seed. Not called for text."""
        ...


class LanguageModel:
    """`lm`: predict the next token of the same document."""

    text, terms = True, PLAIN

    def __init__(self, seq_len: int) -> None:
        self.fields = {name: Field((seq_len,), ("seq",)) for name in ("tokens", "targets", "documents", "positions")}

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return batch["tokens"], batch["documents"], batch["positions"]

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return cross_entropy_sum(output, batch["targets"], self.terms)

    def rows(self, numbers: Sequence[int], seed: int) -> dict[str, Tensor]:
        raise NotImplementedError("the rows of a text task come from the recipe's data")


class TokenLosses(LanguageModel):
    """`lm` for looking at each token: the loss of each one in place of the sum."""

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(each token's loss, float64 [batch, seq], 0 without a target; number of targets int64) of logits."""
        logits, counted = output.double(), batch["targets"] != IGNORE
        shifted = logits - logits.amax(-1, keepdim=True)
        likely = shifted.gather(-1, torch.where(counted, batch["targets"], 0).unsqueeze(-1)).squeeze(-1)
        return (torch.log(torch.exp(shifted).sum(-1)) - likely) * counted, counted.sum()


class MaskedLanguageModel(LanguageModel):
    """`mlm`: predict 15% of the tokens, replaced by `mask`, from both sides (Devlin et al. 2018, masks only).

    The choice depends on token and position alone, so that a row is masked alike on every mesh and in every epoch.
    """

    mask = 0
    """The id of the token that stands for a masked one."""

    def masked_positions(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The masked positions, bool [batch, seq]: 15% of the tokens with a target, by a hash of token and position."""
        mixed = batch["tokens"] * 2654435761 + batch["positions"] * 805459861
        return ((mixed >> 12) % 100 < 15) & (batch["targets"] != IGNORE)

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return (
            torch.where(self.masked_positions(batch), self.mask, batch["tokens"]),
            batch["documents"],
            batch["positions"],
        )

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return cross_entropy_sum(output, torch.where(self.masked_positions(batch), batch["tokens"], IGNORE), self.terms)


class Frames:
    """`frames`: classify every frame of a noisy sequence whose classes each last several frames, like sounds of speech.

    frames: [rows, seq, FEATURES] fp32; targets: [rows, seq], below CLASSES. Model output: [rows, seq, CLASSES].
    """

    text, terms = False, PLAIN
    FEATURES, CLASSES, LASTS = 32, 16, 4

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len
        self.fields = {
            "frames": Field((seq_len, self.FEATURES), ("seq", "feature"), torch.float32),
            "targets": Field((seq_len,), ("seq",)),
        }

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return (batch["frames"],)

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return cross_entropy_sum(output, batch["targets"], self.terms)

    def rows(self, numbers: Sequence[int], seed: int) -> dict[str, Tensor]:
        book = torch.randn(self.CLASSES, self.FEATURES, generator=_generator(seed, -1))
        frames, targets = [], []
        for number in numbers:
            generator = _generator(seed, number)
            sounds = torch.randint(self.CLASSES, (-(-self.seq_len // self.LASTS),), generator=generator)
            target = sounds.repeat_interleave(self.LASTS)[: self.seq_len]
            frames.append(book[target] + torch.randn(self.seq_len, self.FEATURES, generator=generator))
            targets.append(target)
        return {"frames": torch.stack(frames), "targets": torch.stack(targets)}


class Volumes:
    """`volumes`: find the voxels inside a ball in a noisy cube with edge `seq_len`.

    volume: [rows, 1, depth, height, width] fp32; targets: [rows, depth, height, width], 0 or 1. Model output: [rows, 2,
    depth, height, width].
    """

    text, terms = False, PLAIN
    BALLS = 2

    def __init__(self, seq_len: int) -> None:
        self.edge = seq_len
        space = ("depth", "height", "width")
        self.fields = {
            "volume": Field((1, seq_len, seq_len, seq_len), ("channel", *space), torch.float32),
            "targets": Field((seq_len,) * 3, space),
        }

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return (batch["volume"],)

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return cross_entropy_sum(output.movedim(1, -1), batch["targets"], self.terms)

    def rows(self, numbers: Sequence[int], seed: int) -> dict[str, Tensor]:
        place = torch.stack(torch.meshgrid(*[torch.arange(self.edge)] * 3, indexing="ij"), -1).float()
        volumes, targets = [], []
        for number in numbers:
            generator = _generator(seed, number)
            target = torch.zeros((self.edge,) * 3, dtype=torch.int64)
            for _ in range(self.BALLS):
                centre = torch.rand(3, generator=generator) * self.edge
                radius = self.edge * (0.15 + 0.15 * float(torch.rand((), generator=generator)))
                target |= ((place - centre).square().sum(-1) < radius**2).long()
            volumes.append((target + 0.7 * torch.randn(target.shape, generator=generator)).unsqueeze(0))
            targets.append(target)
        return {"volume": torch.stack(volumes), "targets": torch.stack(targets)}


TASKS: dict[str, Callable[[int], LanguageModel | Frames | Volumes]] = {
    "lm": LanguageModel, "mlm": MaskedLanguageModel, "frames": Frames, "volumes": Volumes
}  # fmt: skip


def task_of(name: str, seq_len: int, terms: LossTerms = PLAIN, mask: int = 0) -> Task:
    """The task of a built-in name with these terms of its loss, or of `package:Class`. ValueError where there is
    none. mask: the token of `mlm`."""
    if name in TASKS:
        built_in = TASKS[name](seq_len)
        built_in.terms = terms
        if isinstance(built_in, MaskedLanguageModel):
            built_in.mask = mask
        return built_in
    cls = import_object("task", name)
    try:
        task: Task = cls(seq_len)
    except TypeError as error:
        raise ValueError(f"`task: {name}` cannot be constructed with a length: {error}") from error
    missing = [part for part in ("fields", "text", "inputs", "loss", "rows") if not hasattr(task, part)]
    if missing:
        raise ValueError(f"`task: {name}` has no {', '.join(missing)}: see tpshard.models.objectives.tasks.Task")
    if "targets" not in task.fields or task.fields["targets"].dtype != torch.int64:
        raise ValueError(f"`task: {name}` has no int64 field `targets`")
    return task


def targets_of_rows(task: Task, batch: Mapping[str, Tensor]) -> Tensor:
    """The number of targets of each row, int64 [rows]."""
    counted = task.masked_positions(batch) if isinstance(task, MaskedLanguageModel) else batch["targets"] != IGNORE
    return counted.reshape(len(counted), -1).sum(1)  # a row may have one target alone


def held_out(number: int) -> int:
    """The row number of held-out row `number`, which no training step uses."""
    return _HELD_OUT + number


def _generator(seed: int, number: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
