"""The work of `tpshard evaluate` and `check --serving` in one process: losses of a stored model, or of its tokens, by
the program of training's evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from tpshard.models.objectives.targets import IGNORE
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.watchdog import Doing
from tpshard.programs.compare.float64 import float64
from tpshard.programs.compare.token_scores import ScoredRow, TokenScore
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import with_changes
from tpshard.train.data.corpus import Corpus, TextSource, open_text
from tpshard.train.data.step_batch import StepBatch
from tpshard.train.run.initial_values import begun_from, initial_values
from tpshard.train.run.run_data import held_out, opened_data
from tpshard.train.run.run_store import run_place
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


def open_engine(
    setting: Setting, context: Context, open_model: OpenModel, *, scoring: bool = False, wide: bool = False
) -> TrainingEngine:
    """The engine of a stored model on this mesh, without gradients and moments. Every rank calls it. scoring: its
    evaluation gives each token's loss. wide: its state is float64 where the programs have float32."""
    context.watchdog.doing = Doing("building the programs")
    programs = replace(training.build(setting), scoring=scoring)
    context.agree(programs.fingerprints)
    # a run with adapters leaves its base out of its checkpoints
    initial = _no_block
    if setting.spec.left_out:
        begun = begun_from(setting.recipe, run_place(setting.recipe) / "checkpoints", context)
        initial = initial_values(setting.recipe, setting.spec, begun)
    with float64() if wide else nullcontext():
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
    named = {name: _whole(open_text(name, replace(form, where={}), key="--data")) for name in dict.fromkeys(texts)}
    return [(name, held_out(setting, data_rank, (text, tokenizer), asked)) for name, text in named.items()]


def _whole(corpus: Corpus) -> TextSource:
    """All files of a corpus; of a data set with a split of its own for validation, that."""
    return replace(corpus.train, part="all") if corpus.train.part != "all" else corpus.held_out


def _no_block(*_: Any, **__: Any) -> Any:
    raise AssertionError("a stored model has no initial values")


# ---- each token ----------------------------------------------------------------------------------------------------
WIDE = (
    "compile=eager", "model.dtype=fp32", "fsdp.master_dtype=fp32", "fsdp.param_dtype=fp32", "fsdp.reduce_dtype=fp32"
)  # fmt: skip
"""The changes with which a program computes in one dtype, which then is float64."""


def scored_rows(setting: Setting, context: Context, open_model: OpenModel) -> list[ScoredRow]:
    """The first held-out rows of each text, `evaluate.sequences` of them, with the log-probability of each target.

    They are computed twice, as the recipe says and in float64. Every rank calls it.
    """
    data_rank = context.mesh.linear_index(setting.data_axes, context.rank)
    data = opened_data(setting, setting.recipe.run.folder)
    batches = [batch for text in data.held_out for batch in held_out(setting, data_rank, text)]
    logprobs = _logprobs(setting, context, open_model, batches)
    wide = Setting(with_changes(setting.recipe, WIDE), setting.mesh, setting.spec)
    exact = _logprobs(wide, context, open_model, batches, wide=True)
    first = data_rank * setting.batch.per_device
    own = [[micro, first + i, *(batch[name][i].tolist() for name in ("tokens", "documents", "targets"))]
           for micro, batch in enumerate(batches) for i in range(setting.batch.per_device)]  # fmt: skip
    return _joined([row for rows in context.gather(own) for row in rows], setting, logprobs, exact)


Places = dict[tuple[int, int], list[float]]
"""(micro-batch, row of all data ranks) -> the values at the row's positions."""


def _logprobs(
    setting: Setting, context: Context, open_model: OpenModel, batches: Sequence[StepBatch], wide: bool = False
) -> Places:
    engine = open_engine(setting, context, open_model, scoring=True, wide=wide)
    blocks: list[Any] = []
    for micro, batch in enumerate(batches):
        with float64() if wide else nullcontext():
            block = engine.token_losses(batch)
        context.watchdog.beat()
        if block is not None:
            losses: Tensor = block.tensor.double().cpu()
            blocks.append([micro, list(block.starts), losses.tolist()])
    places: Places = {}
    for micro, (row, start), losses in (block for of_rank in context.gather(blocks) for block in of_rank):
        for i, values in enumerate(losses):
            whole = places.setdefault((micro, row + i), [0.0] * setting.seq_len)
            whole[start : start + len(values)] = [-loss for loss in values]
    return places


def _joined(rows: Sequence[Any], setting: Setting, logprobs: Places, exact: Places) -> list[ScoredRow]:
    """The rows in the order of their text, without those that only fill up micro-batches."""
    each, found = setting.batch.per_device, dict[tuple[int, int, int], ScoredRow]()
    for micro, row, tokens, documents, targets in rows:
        scores = [
            TokenScore(position, target, logprobs[micro, row][position], exact[micro, row][position])
            for position, target in enumerate(targets) if target != IGNORE
        ]  # fmt: skip
        if scores:
            found[row // each, micro, row % each] = ScoredRow(tokens, documents, scores)
    return [found[key] for key in sorted(found)]
