"""The rows that a run trains on and is evaluated on, each rank its own."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from tpshard.diagnostics.diagnostic import Exit, Mistakes, as_text, plural
from tpshard.models.folders.folder_files import carried
from tpshard.models.folders.folder_tokenizer import tokenizer_files
from tpshard.models.objectives.targets import IGNORE
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.watchdog import Doing
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.keys.data_keys import TokenizerTraining
from tpshard.recipes.keys.schedule_laws import schedule_beyond
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import with_steps
from tpshard.recipes.text.other_tools import MADE_TOKENIZERS
from tpshard.train.data.conversations import AnswerTokenizer
from tpshard.train.data.corpus import Corpus, TextSource
from tpshard.train.data.generated_rows import GeneratedRows, held_out_rows
from tpshard.train.data.made_tokenizer import byte_tokenizer, trained_tokenizer
from tpshard.train.data.open_data import OpenedData, open_data
from tpshard.train.data.row_columns import in_words
from tpshard.train.data.step_batch import StepBatch
from tpshard.train.data.stream import Loader, held_out_batch
from tpshard.train.data.tokens import TextTokenizer, load_tokenizer
from tpshard.train.run.run_output import logger, say

HeldOut = Mapping[str, Sequence[StepBatch]]
"""This rank's micro-batches of held-out rows, by the name of their text."""


def data_of(setting: Setting, data_rank: int, folder: Path, context: Context) -> tuple[Loader | GeneratedRows, HeldOut]:
    """This rank's rows of every step, and its micro-batches of held-out rows by the names of their texts."""
    recipe, plan = setting.recipe, setting.batch
    evaluates = bool(recipe.evaluate.every_steps)
    if not setting.task.text:
        rows = GeneratedRows(setting.task, recipe, plan.rows(data_rank))
        return rows, {recipe.task: list(held_out(setting, data_rank))} if evaluates else {}
    data = opened_data(setting, folder, context)
    context.agree({"tokenizer": " ".join(share.tokenizer.fingerprint for share in data.mixture.shares)})
    loader = Loader(
        data.mixture, seq_len=setting.seq_len, global_sequences=plan.global_sequences, part=plan.rows(data_rank),
        seed=recipe.seed, bad_rows=recipe.data.bad_rows,
    )  # fmt: skip
    return loader, {t.name: list(held_out(setting, data_rank, (t, tok))) for t, tok in data.held_out if evaluates}


def counted(
    recipe: Recipe, loader: Loader | GeneratedRows, context: Context, data_rank: int, data_ranks: int
) -> Recipe:
    """The recipe with the steps that its `data.epochs` make, if it has them. Every rank calls it."""
    if recipe.data.epochs is None or recipe.where("train.steps").line:
        return recipe
    where = recipe.where("data.epochs")
    if not isinstance(loader, Loader):
        message, fix = f"`data.epochs`, but the task {recipe.task} makes its rows without end", "train.steps"
        raise Mistakes.one(message, exit=Exit.RECIPE, where=where, fix=fix)
    with context.watchdog.allow(float(recipe.timeout_s.start), "counting the steps of data.epochs"):
        steps = loader.count_steps(data_rank, data_ranks, context.gather, context.watchdog.beat)
    if context.is_main:
        say(f"{plural(recipe.data.epochs, 'epoch')} of {loader.text.name} make {plural(steps, 'step')}\n", sys.stderr)
    known = with_steps(recipe, steps)
    if context.is_main and (warnings := list(schedule_beyond(known))):
        say(as_text(warnings) + "\n", sys.stderr)
    return known


def notes_of(loader: Loader | GeneratedRows, context: Context, data_rank: int) -> list[str]:
    """What was done to documents that were not taken as they are, over all ranks. Every rank calls it."""
    own = loader.notes if isinstance(loader, Loader) else Counter()
    of_ranks = dict(context.gather((data_rank, dict(own))))  # ranks that read the same rows count once
    total: Counter[str] = sum(map(Counter, of_ranks.values()), Counter())
    return [in_words(note, count) for note, count in total.items()]


def opened_data(setting: Setting, folder: Path, context: Context | None = None) -> OpenedData:
    """The recipe's sources with their tokenizers. folder: the run's, where the sample is kept if the cache cannot be
    written. context: the workers of a run, which may train a tokenizer; every rank calls it then."""
    recipe = setting.recipe
    return open_data(
        recipe, setting.seq_len, lambda corpus: _tokenizer(recipe, corpus, setting, folder, context), folder
    )


def _part(total: int, setting: Setting, data_rank: int) -> tuple[range, int]:
    """This rank's part of `total` held-out rows, and the number of rows per rank, padding included."""
    each = -(-total // setting.batch.data_ranks)
    return range(min(data_rank * each, total), min((data_rank + 1) * each, total)), each


def held_out(
    setting: Setting, data_rank: int, text: tuple[TextSource, TextTokenizer | AnswerTokenizer] | None = None,
    sequences: int | None = None,
) -> Iterator[StepBatch]:  # fmt: skip
    """This rank's micro-batches of held-out sequences; equally many on every rank, the same sequences on any mesh.

    text: the held-out text with its tokenizer; None for a task that makes its rows. sequences: how many, by default as
    the recipe says; 0 for all.
    """
    recipe = setting.recipe
    asked = recipe.evaluate.sequences if sequences is None else sequences
    if text is None:
        numbers, each = _part(asked, setting, data_rank)
        yield from held_out_rows(setting.task, recipe, numbers, each, setting.batch.per_device)
        return
    source, tokenizer = text
    batch = held_out_batch(
        source, tokenizer, seq_len=setting.seq_len, sequences=asked, bad_rows=recipe.data.bad_rows
    )  # fmt: skip
    count = len(batch.origin)
    if count < asked and data_rank == 0 and (recipe.evaluate.every_steps or sequences is not None):
        known = plural(sum(map(bool, batch.origin)), "sequence")
        say(f"{asked} held-out sequences were asked for; {source.name} has {known}, which count\n", sys.stderr)
    rows, each = _part(count, setting, data_rank)
    zeros = torch.zeros(setting.seq_len, dtype=torch.int64)
    blank = {"tokens": zeros, "targets": zeros + IGNORE, "documents": zeros, "positions": torch.arange(len(zeros))}
    yield from batch.rows(rows.start, rows.stop).micro_batches(blank, each, setting.batch.per_device)


def _tokenizer(recipe: Recipe, corpus: Corpus, setting: Setting, run: Path, context: Context | None) -> TextTokenizer:
    named = recipe.data.tokenizer
    where = recipe.where("data.tokenizer")
    if isinstance(named, TokenizerTraining):
        if context is None:
            raise Mistakes.one(
                "there is no tokenizer: only `train` trains one", exit=Exit.DATA, where=where,
                why=f"no tokenizer in {carried(run)}", fix="name the model's own in `data.tokenizer`",
            )  # fmt: skip
        context.watchdog.doing = Doing("training the tokenizer")
        folder: Path | None = trained_tokenizer(recipe, corpus.train, run, context, partial(say, stream=sys.stderr))
    elif named == "bytes":
        folder = byte_tokenizer(run)
    else:
        folder = corpus.tokenizer if named is None else Path(named)
    if folder is None:
        raise Mistakes.one(
            "`data.tokenizer` names no tokenizer", exit=Exit.DATA, where=where,
            fix=f"the folder of a Hugging Face tokenizer; {MADE_TOKENIZERS}",
        )  # fmt: skip
    data, rows = recipe.data, setting.spec.sizes.vocab
    if not folder.is_dir() and tokenizer_files(carried(run)):
        folder = carried(run)  # the folder has moved since the run began
    tokenizer = load_tokenizer(folder, bos=data.bos, eos=data.eos, rows=rows, where=where)
    for note in tokenizer.notes:
        logger.warning(note)
    return tokenizer
