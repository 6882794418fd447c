"""Checks of a recipe's text and tokenizer, which are read only as far as an error can be seen."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes
from tpshard.programs.fit.recipe_model import carried_by
from tpshard.recipes.keys.data_keys import BYTE_TOKENS

if TYPE_CHECKING:
    from tpshard.recipes.keys.schema import Recipe
    from tpshard.train.data.corpus import Corpus
    from tpshard.train.data.row_columns import Columns, Labelled


BYTES_OF_TOKEN = 32
"""Bytes of a file for each token of a batch above which it holds a batch surely: no tokenizer's mean token is longer,
and `validate` need not tokenize the text."""


def token_errors(recipe: Recipe, vocab: int | None) -> list[Diagnostic]:
    """The error where the vocabulary is smaller than the tokenizer's."""
    count = _tokenizer_size(recipe)
    if count is None or vocab is None or count <= vocab:
        return []
    made = recipe.data.made_tokens is not None
    if not made and recipe.data.stored()["tokenizer"] is not None:
        from tpshard.models.folders.folder_tokenizer import FolderTokenizer

        with contextlib.suppress(ValueError, OSError):  # texts can contain the others
            notes = FolderTokenizer(Path(recipe.data.tokenizer_folder or ""), vocab).notes
            fix = "nothing, unless texts should contain them"
            return [Diagnostic(n, severity="warning", where=recipe.where("data.tokenizer"), fix=fix) for n in notes]
    keys = ("model.vocab", "data.tokenizer.train", "data.tokenizer", "model")
    stored, rounded = recipe.model.named_by != "preset", -(-count // 128) * 128
    own = "name the model's own tokenizer in `data.tokenizer`, or " if stored else ""
    fix = f"{own}model.vocab: {rounded}"
    if made and vocab > BYTE_TOKENS:
        fix += f", or data.tokenizer: {{train: {vocab}}}"
    return [
        Diagnostic(
            f"the tokenizer has {count:,} tokens, but the model's vocabulary has {vocab:,}",
            exit=Exit.RECIPE,
            where=next((s for k in keys if (s := recipe.where(k)).line), None),
            why=f"{count - vocab:,} tokens would have no embedding row",
            fix=fix,
        )
    ]


def text_errors(recipe: Recipe) -> list[Diagnostic]:
    """The mistakes in a recipe's text and tokenizer. Commands that read neither need not call this.

    An absolute path that does not exist is a warning: the recipe may be for other machines.
    """
    if recipe.task not in ("lm", "mlm"):
        return []
    from tpshard.train.data.hub import is_on

    diagnostics: list[Diagnostic] = []
    named = [("source", number) for number in range(len(recipe.data.all_sources))]
    for key, number in (*named, ("tokenizer", 0)):
        value, unset = None, None
        try:
            value = recipe.data.all_sources[number].source if key == "source" else recipe.data.tokenizer_folder
        except Mistakes as mistakes:  # its environment variable is not set
            unset = mistakes.diagnostics[0]
        if unset is not None and key == "tokenizer":
            diagnostics.append(_no_tokenizer(recipe, unset))
        if value is None or (key == "source" and (value == "sample" or is_on(value))):
            continue
        from tpshard.models.folders.folder_tokenizer import tokenizer_files
        from tpshard.train.data.bad_rows import peek
        from tpshard.train.data.corpus import open_text
        from tpshard.train.data.open_data import columns_of
        from tpshard.train.data.tokens import require_tokenizer

        if key == "tokenizer" and not os.path.isdir(value) and tokenizer_files(carried_by(recipe)):
            continue  # the folder has moved since the run began, which carries it
        where = recipe.source_place(number) if key == "source" else recipe.where("data.tokenizer")
        try:
            if key == "source":
                one = recipe.data.all_sources[number]
                columns = columns_of(recipe, number)
                text = open_text(value, columns, where=where, split=one.split, key=recipe.source_key(number)).train
                peek(text, recipe.data.bad_rows, learn=_learner(recipe, columns))
            else:
                require_tokenizer(value, where=where)
        except Mistakes as mistakes:
            named_by = recipe.source_key(number) if key == "source" else "data.tokenizer"
            elsewhere = Diagnostic(
                f"{value} is not on this machine", severity="warning", where=where,
                why="`train` needs it on every host", fix=f"correct `{named_by}`, unless the recipe is for other hosts",
            )  # fmt: skip
            diagnostics += [elsewhere] if _is_elsewhere(value) else mistakes.diagnostics
    return diagnostics


def too_little(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """The error of text that `train` would refuse, since it holds less than one batch: where the only source is a small
    one of this machine, whose tokenizer is here too."""
    from tpshard.train.data.bad_rows import SMALL_CONVERSATIONS
    from tpshard.train.data.hub import is_on
    from tpshard.train.data.open_data import open_data, open_sources

    data, rows, length = recipe.data, recipe.batch.global_sequences, recipe.model.seq_len
    if recipe.task not in ("lm", "mlm") or len(data.all_sources) > 1 or data.epochs is not None:
        return ()
    try:
        (only,) = data.all_sources
        if only.source == "sample" or is_on(only.source) or only.exhausted == "stop":
            return ()
        (text,) = (corpus.train for corpus in open_sources(recipe))
        paths = [file.place for file in text.files if isinstance(file.place, Path)]
        size = sum(path.stat().st_size for path in paths)
        if len(paths) < len(text.files) or size > min(SMALL_CONVERSATIONS, BYTES_OF_TOKEN * rows * length):
            return ()
        from tpshard.train.data.made_tokenizer import made_tokenizer
        from tpshard.train.data.source_reader import SourceReader
        from tpshard.train.data.tokens import TextTokenizer, load_tokenizer

        def tokenizer(corpus: Corpus) -> TextTokenizer:
            made = None if data.made_tokens is None else made_tokenizer(corpus.train, data.made_tokens)
            folder = made or data.tokenizer_folder or corpus.tokenizer or ""
            return load_tokenizer(folder, bos=data.bos, eos=data.eos, where=recipe.where("data.tokenizer"))

        (share,) = open_data(recipe, length, tokenizer).mixture.shares
        try:
            reader = SourceReader(share.text, share.tokenizer, None, 1, (), 1, recipe.seed, data.bad_rows, checks=False)
            reader.check_enough(rows, length)
        except Mistakes as mistakes:
            return mistakes.diagnostics
    except (Mistakes, OSError, ValueError):  # of the text or the tokenizer, which are told as they are
        return ()
    return ()


def _learner(recipe: Recipe, columns: Columns) -> Callable[[str], Labelled | None] | None:
    """What reads rows of conversations, as far as their template and tokenizer are here. Raises `Mistakes` for a
    template that cannot be read."""
    if columns.key == "column":
        return None
    from tpshard.train.data.conversations import answer_tokenizer, renders
    from tpshard.train.data.open_data import template_of
    from tpshard.train.data.tokens import load_tokenizer

    template, folder, where = template_of(recipe), "", recipe.where("data.tokenizer")
    with contextlib.suppress(Mistakes):
        folder = recipe.data.tokenizer_folder or ""
    if folder and os.path.isdir(folder) and recipe.data.made_tokens is None:
        try:
            read = load_tokenizer(folder, bos=recipe.data.bos, eos=recipe.data.eos, where=where)
        except Mistakes:  # told of the tokenizer
            return None
        where = where if template is None else recipe.where("data.chat_template")
        return answer_tokenizer(read, columns, recipe.model.seq_len, recipe.data.too_long, where, template).labelled
    if template is None or columns.key != "messages":
        return None
    return renders(template, recipe.where("data.chat_template"))


def _no_tokenizer(recipe: Recipe, unset: Diagnostic) -> Diagnostic:
    """The diagnostic for a tokenizer of which nothing is known here: an error where the text is on this machine."""
    source = recipe.data.stored()["source"]
    here = source not in ("sample", "c4") and os.path.exists(str(source))
    return replace(
        unset, message=f"`data.tokenizer` is not known here: {unset.message}", exit=Exit.DATA,
        severity="error" if here else "warning",
    )  # fmt: skip


def _is_elsewhere(path: str) -> bool:
    """Whether an absolute path, or the folder of an absolute glob, does not exist here."""
    start, *pattern = re.split(r"[*?\[]", path)
    return os.path.isabs(path) and not os.path.exists(os.path.dirname(start) if pattern else start)


def _tokenizer_size(recipe: Recipe) -> int | None:
    """The size of the recipe's tokenizer, where it can be read without loading it."""
    if (made := recipe.data.made_tokens) is not None:
        return made
    if recipe.data.stored()["tokenizer"] is None:
        if recipe.data.stored()["source"] != "sample":
            return None
        from tpshard.train.data.sample import VOCAB

        return VOCAB
    from tpshard.files.folder_json import read_json

    try:
        raw: Any = read_json(Path(recipe.data.tokenizer_folder or ""), "tokenizer.json")
        ids = [*raw["model"]["vocab"].values(), *(token["id"] for token in raw.get("added_tokens", ()))]
        return max(ids) + 1
    except (Mistakes, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the code that loads the tokenizer reports its errors
