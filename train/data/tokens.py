"""The tokenizer of a run, from a Hugging Face folder or from the sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from tpshard.diagnostics.diagnostic import Exit, Mistakes, Source, looked_for
from tpshard.models.folders.folder_tokenizer import FolderTokenizer, no_tokenizer, tokenizer_files
from tpshard.recipes.text.other_tools import MADE_TOKENIZERS, hub_fix
from tpshard.train.data.corpus import pieces
from tpshard.train.data.row_columns import Labelled

Around = Literal["tokenizer", "always", "never"]
"""Whether documents begin or end with a token: as the tokenizer itself does it, always or never."""


@dataclass(frozen=True)
class TextTokenizer:
    """Turns documents into token ids. `vocab` is the smallest vocabulary that contains every id."""

    folder: Path
    vocab: int
    begin: tuple[int, ...]
    """The ids before each document."""
    after: tuple[int, ...]
    """The ids after each document."""
    end: int
    """The id of padding, the end-of-text token."""
    fingerprint: str
    """A hash of the files that decide the ids, and of the ids around documents; a resumed run compares it."""
    encode: Callable[[str], list[int]]
    """Turns text into ids, without special tokens."""
    notes: tuple[str, ...] = ()
    """What the folder says and is not done, in sentences."""
    others: Mapping[str, str] = field(default_factory=dict)
    """The settings of a recipe with which the fingerprint would be another one, by that fingerprint."""

    whole = False
    """Whether documents are packed whole into sequences where they fit; text goes on in the next sequence."""

    def pieces(self, text: str) -> Iterator[str]:
        """The parts of a long text that are tokenized one by one."""
        return pieces(text)

    def labelled(self, text: str, *, first: bool = True, last: bool = True) -> Labelled:
        """The ids of a document or of a piece of one, all of them targets."""
        ids = self.document(text, first=first, last=last)
        return Labelled(ids, ids)

    def document(self, text: str, *, first: bool = True, last: bool = True) -> list[int]:
        """The ids of a document or of a piece of one."""
        return [*(self.begin if first else ()), *self.encode(text), *(self.after if last else ())]


def load_tokenizer(
    folder: Path | str,
    *,
    bos: Around = "tokenizer",
    eos: Around = "always",
    rows: int | None = None,
    where: Source | None = None,
) -> TextTokenizer:
    """The tokenizer of a folder; nothing in it is executed.

    Args:
        bos: whether documents begin with the begin token, or what else the tokenizer puts there.
        eos: whether documents end with the end-of-text token.
        rows: the model's embedding rows, if known.

    Raises:
        Mistakes: exit 6 where the folder has no tokenizer, a damaged one, or one without an end-of-text token (or,
            with `bos: always`, without a begin token); exit 3 where its texts need more rows than the model has.
    """
    folder = Path(folder).expanduser()
    read = read_tokenizer(folder, where)
    if read.end is None:
        named = read.special.get("eos_token")
        raise Mistakes.one(
            f"the tokenizer {folder} has no end-of-text token", exit=Exit.DATA, where=where,
            why="eos_token is missing" if named is None else f"eos_token is {named!r}, not in it",
            fix="name one as eos_token in its tokenizer_config.json",
        )  # fmt: skip
    if bos == "always" and read.begin is None:
        raise Mistakes.one(
            f"`data.bos: always`, but the tokenizer {folder} names no bos_token", exit=Exit.DATA, where=where,
            fix="name one as bos_token in its tokenizer_config.json, or data.bos: tokenizer",
        )  # fmt: skip
    if rows is not None and read.size > rows:
        try:
            read = FolderTokenizer(folder, rows)
        except ValueError as error:
            raise Mistakes.one(
                f"the tokenizer {folder} has {read.size} tokens, but model.vocab is {rows}", exit=Exit.RECIPE,
                where=where, why=str(error),
                fix=f"set model.vocab to {read.size} or more, or use the model's own tokenizer",
            ) from error  # fmt: skip
    assert read.end is not None
    around = {(b, e): _around(read, b, e) for b in get_args(Around) for e in get_args(Around)}
    begin, after = around[bos, eos]

    def encode(text: str) -> list[int]:
        try:
            return read.encode(text, special=False)
        except ValueError as error:
            raise Mistakes.one(
                f"the tokenizer {folder} fails on a document that begins with {text[:40]!r}", exit=Exit.DATA,
                where=where, why=str(error), fix="correct the pattern in its tokenizer.json, or remove the document",
            ) from error  # fmt: skip

    others = {_fingerprint(read, *ids): f"data.bos: {b}, data.eos: {e}" for (b, e), ids in around.items()}
    return TextTokenizer(
        folder, min(read.size, rows or read.size), begin, after, read.end, _fingerprint(read, begin, after),
        encode, tuple(read.notes), others,
    )  # fmt: skip


def _around(read: FolderTokenizer, bos: Around, eos: Around) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids before and after a document."""
    begin = read.prefix if read.begin is None or read.begin in read.prefix else (read.begin, *read.prefix)
    after = read.suffix if read.end is None or read.end in read.suffix else (*read.suffix, read.end)
    starts: Mapping[Around, tuple[int, ...]] = {"tokenizer": read.prefix, "always": begin, "never": ()}
    return starts[bos], {"tokenizer": read.suffix, "always": after, "never": ()}[eos]


def _fingerprint(read: FolderTokenizer, begin: tuple[int, ...], after: tuple[int, ...]) -> str:
    """A hash of what decides a document's ids; the same as that of runs from before `data.bos` where ids are."""
    digest = read.files_digest.copy()
    first = begin[0] if len(begin) == 1 else begin or None
    digest.update(repr((first, read.end)).encode())
    if after != (read.end,) or read.without_rows:
        digest.update(repr((after, read.without_rows)).encode())
    return digest.hexdigest()[:32]


def read_tokenizer(folder: Path, where: Source | None = None) -> FolderTokenizer:
    """The tokenizer of a folder, as all commands read it. Mistakes (exit 6) where it cannot be read."""
    require_tokenizer(folder, where)
    try:
        return FolderTokenizer(folder)
    except (ValueError, OSError) as error:
        raise _unreadable(folder, str(error), where) from error


def require_tokenizer(folder: Path | str, where: Source | None = None) -> None:
    """Raises Mistakes (exit 6) where a folder has no files of a tokenizer; reads none."""
    try:
        folder = Path(folder).expanduser()
        folder.stat()
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, no right to look, no such home
        why = getattr(error, "strerror", None) or str(error)
        if isinstance(error, FileNotFoundError):
            why = looked_for(str(folder), where) or "there is no such folder"
        raise _unreadable(Path(folder), why, where) from None
    if not tokenizer_files(folder):
        raise _unreadable(folder, no_tokenizer(folder), where)


def _unreadable(folder: Path, why: str, where: Source | None) -> Mistakes:
    return Mistakes.one(
        f"the tokenizer {folder} cannot be read",
        exit=Exit.DATA,
        where=where,
        why=why,
        fix=hub_fix(str(folder)) or f"a folder with tokenizer.json and tokenizer_config.json; {MADE_TOKENIZERS}",
    )
