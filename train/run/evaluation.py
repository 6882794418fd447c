"""The work of `tpshard evaluate` in one process: losses of a stored model by the program of training's evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.watchdog import Doing
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.train.data.corpus import Corpus, TextSource, open_text
from tpshard.train.data.step_batch import StepBatch
from tpshard.train.run.initial_values import initial_values
from tpshard.train.run.run_data import held_out, opened_data
from tpshard.train.run.training_engine import ReadBlock, TrainingEngine

OpenModel = Callable[[Mapping[str, Any]], ReadBlock]
"""Opens a stored model that must have tensors of these shapes and dtypes; returns the reader of its blocks."""


@dataclass(frozen=True)
class HeldOutLoss:
    """The loss of a model on one text."""

    data: str
    """The text's name."""
    sequences: int
    tokens: int
    """Target tokens, over which the loss is averaged."""
    loss: float
    """Nats per target token."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))


def evaluate(setting: Setting, context: Context, open_model: OpenModel, texts: Sequence[str]) -> list[HeldOutLoss]:
    """The losses on whole `texts`, or without any on the held-out part of the recipe's data. Every rank calls it.

    Raises `Mistakes`: exit 6 for data that cannot be read, 7 for another model's checkpoint.
    """
    context.watchdog.doing = Doing("opening the data")
    data_rank = context.mesh.linear_index(setting.data_axes, context.rank)
    batches = {name: list(rows) for name, rows in _rows(setting, data_rank, texts)}
    engine = open_engine(setting, context, open_model)
    losses = []
    for name, rows in batches.items():
        loss, tokens = total(engine, rows, context)
        sequences = sum(context.gather(sum(bool(origin) for batch in rows for origin in batch.origin)))
        copies = context.world // setting.batch.data_ranks
        losses.append(HeldOutLoss(name, sequences // copies, tokens, loss / tokens if tokens else math.nan))
    return losses


def open_engine(setting: Setting, context: Context, open_model: OpenModel) -> TrainingEngine:
    """The engine of a stored model on this mesh, without gradients and moments. Every rank calls it."""
    context.watchdog.doing = Doing("building the programs")
    programs = training.build(setting)
    context.agree(programs.fingerprints)
    # a run with adapters leaves its base out of its checkpoints
    initial = initial_values(setting.recipe, setting.spec) if setting.spec.left_out else _no_block
    engine = TrainingEngine(programs, context, initial, trains=False)
    context.watchdog.doing = Doing("reading the model")
    engine.load(open_model(engine.stored_shapes()))
    return engine


def total(engine: TrainingEngine, batches: Sequence[StepBatch], context: Context) -> tuple[float, int]:
    """(summed loss in nats, target tokens) of micro-batches, over all data ranks. Every rank calls it."""
    loss, tokens = 0.0, 0
    for batch in batches:
        more, count = engine.evaluate(batch)
        loss, tokens = loss + more, tokens + count
        context.watchdog.beat()
    return loss, tokens


def _rows(setting: Setting, data_rank: int, texts: Sequence[str]) -> list[tuple[str, Any]]:
    recipe = setting.recipe
    if not setting.task.text:
        return [(recipe.task, held_out(setting, data_rank))]
    data = opened_data(setting, recipe.run.folder)
    if not texts:
        return [(text.name, held_out(setting, data_rank, (text, tokenizer))) for text, tokenizer in data.held_out]
    asked = recipe.evaluate.sequences if recipe.where("evaluate.sequences").file.startswith("<override") else 0
    form, tokenizer = data.mixture.shares[0].text.columns, data.mixture.tokenizer
    named = {name: _whole(open_text(name, replace(form, where={}))) for name in dict.fromkeys(texts)}
    return [(name, held_out(setting, data_rank, (text, tokenizer), asked)) for name, text in named.items()]


def _whole(corpus: Corpus) -> TextSource:
    """All files of a corpus; of a data set with a split of its own for validation, that."""
    return replace(corpus.train, part="all") if corpus.train.part != "all" else corpus.held_out


def _no_block(*_: Any, **__: Any) -> Any:
    raise AssertionError("a stored model has no initial values")
