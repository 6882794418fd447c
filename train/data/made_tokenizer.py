"""The tokenizers that `data.tokenizer` has tpshard make: a BPE trained on the run's text, or the 256 bytes alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.files.atomic import write_aside
from tpshard.files.file_lock import one_at_a_time
from tpshard.models.folders.folder_files import carried
from tpshard.models.folders.folder_tokenizer import tokenizer_files
from tpshard.recipes.keys.data_keys import BYTE_TOKENS
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import load
from tpshard.train.data.byte_bpe import byte_bpe
from tpshard.train.data.corpus import TextSource, pieces, rows
from tpshard.train.data.sample import cache_dir

if TYPE_CHECKING:
    from tpshard.parallelism.runtime.context import Context

MOST = 32 << 20
"""Characters; a tokenizer is trained on so much from the start of the training text."""


def byte_tokenizer(fallback: Path | None = None) -> Path:
    """The folder of the tokenizer `bytes`. Errors as in `stored`."""
    return stored(byte_bpe((), BYTE_TOKENS)[0], fallback)


def made_tokenizer(text: TextSource, size: int) -> Path:
    """The folder of the tokenizer that a new run would make of its text: `trained_tokenizer` on one process. Errors as
    in `stored`."""
    return stored(byte_bpe(_first(text) if size > BYTE_TOKENS else (), size)[0])


def trained_tokenizer(
    recipe: Recipe, text: TextSource, run: Path, context: Context, say: Callable[[str], None]
) -> Path:
    """The folder of the tokenizer of `data.tokenizer: {train: SIZE}`, the same on all ranks. Every rank calls it.

    The run's own, however its text has changed; for a new run rank 0 trains it on the training part of the text, and
    says so.

    Raises:
        Mistakes: exit 6, where the text cannot be read or no folder can be written.
    """
    own = carried(run)
    files: Mapping[str, str] | None = None
    resumed = context.is_main and _asked_before(recipe, run) and "tokenizer.json" in tokenizer_files(own)
    if resumed:
        names = [name for name in ("tokenizer.json", "tokenizer_config.json") if (own / name).is_file()]
        files = {name: (own / name).read_text(encoding="utf-8") for name in names}
    elif context.is_main:
        size = recipe.data.made_tokens or BYTE_TOKENS
        files, count = byte_bpe(_first(text), size)
        short = "" if count == size else f": the text is too short for the {size:,} of `data.tokenizer.train`"
        say(f"trained a tokenizer of {count:,} tokens on {text.name}{short}\n")
    files = context.from_main(files)
    return own if resumed else stored(files, run)


def stored(files: Mapping[str, str], fallback: Path | None = None) -> Path:
    """A folder of this machine with the files of a tokenizer, named by their hash: in the user's cache folder, or else
    in `fallback`. Safe with any number of processes.

    Raises:
        Mistakes: exit 6, where neither folder can be written.
    """
    name = f"tokenizer-{hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]}"
    refused: list[str] = []
    for parent in (cache_dir(), *([fallback] if fallback is not None else [])):
        folder = parent / name
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(parent / f".{name}.lock"):
                if not _holds(folder, files):
                    with write_aside(folder, overwrite=True) as aside:
                        for file, content in files.items():
                            (aside / file).write_text(content, encoding="utf-8")
            return folder
        except OSError as error:
            refused.append(f"{parent}: {error.strerror or error}")
    raise Mistakes.one(
        "the tokenizer cannot be written anywhere", exit=Exit.DATA, why="; ".join(refused),
        fix="set TPSHARD_CACHE to a folder with 10 MB to spare",
    )  # fmt: skip


def _holds(folder: Path, files: Mapping[str, str]) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return all((folder / name).read_text(encoding="utf-8") == content for name, content in files.items())
    return False


def _asked_before(recipe: Recipe, run: Path) -> bool:
    """Whether the run in the folder `run` began with the same `data.tokenizer`."""
    try:
        return load(run / "recipe.yaml").data.made_tokens == recipe.data.made_tokens
    except Mistakes:  # there is no such run, or a later version wrote it
        return False


def _first(text: TextSource) -> Iterator[str]:
    """The documents of a split in the order of its files, up to `MOST` characters."""
    left = MOST
    for file in text.files:
        for row in rows(text, file):
            if row.text is None or not text.keeps(row.text):
                continue
            for piece in pieces(row.text):
                yield piece[:left]
                left -= len(piece)
                if left <= 0:
                    return
