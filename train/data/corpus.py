"""Sources of text: C4 and other data sets on the hub, files on disk, or the sample.

A source is a list of files (`train.text_formats`); sources differ in how a file is opened. `datasets` finds the files
of a data set on the hub and streams their bytes.
"""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal, cast

from tpshard.diagnostics.diagnostic import Exit, Mistakes, Source, looked_for
from tpshard.files.hub_folder import why_not
from tpshard.train.data import hub
from tpshard.train.data.row_columns import Columns, TextRow
from tpshard.train.data.sample import ensure_sample
from tpshard.train.data.shard_sums import ShardSums
from tpshard.train.data.text_formats import FORMATS, NoColumn, TextFormat, format_of, open_decompressed

logger = logging.getLogger(__name__)

C4 = "hub:allenai/c4:en"
"""The data set that `c4` stands for."""
ANY_SOURCE = "`sample`, `c4`, `hub:OWNER/NAME`, or a folder, file or pattern of *.jsonl, *.json.gz, *.parquet or *.txt"
"""What `data.source` may be, for errors."""
SUFFIXES = tuple(suffix for one in FORMATS for suffix in one.suffixes if suffix != ".json")
"""Files of a folder that are read. A *.json beside data usually describes it, so that it is read where it is named."""
HELD_OUT = 20
"""One document in this many is held out if a source names no held-out file. With this many files or more, the last
file is held out instead."""
PIECE = 1 << 18
"""Characters per piece of a longer document. Tokenizing 100 MB at once would take all memory."""
SMALL = 16 << 20
"""Bytes; local data up to this size is read once before the first step, so that errors in it show at the start."""
SUMMED = 256 << 20
"""Bytes; local data up to this size is summed before it is read, so that a later change of any part is noticed."""


@dataclass(frozen=True)
class TextFile:
    """One file of text; the suffix of its name tells the format."""

    name: str
    """The file's name in errors and in the order of files."""
    place: Path | str
    """A path on this machine's disks, or the URL of a file of a hub data set."""
    identity: str = ""
    """The hub's hash of the file's content; "" where the hub tells none."""

    def open(self) -> BinaryIO:
        """The file's bytes as stored. `datasets` streams those of the hub (ranges, retries, login)."""
        if isinstance(self.place, Path):
            return cast(BinaryIO, self.place.open("rb"))
        from datasets.utils.file_utils import xopen

        return cast(BinaryIO, xopen(self.place, "rb"))

    def fingerprint(self) -> str:
        """The file's size and a hash of its first and last 64 KiB; for one on the hub `identity`."""
        if not isinstance(self.place, Path):
            return self.identity
        with self.place.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            digest = hashlib.sha256(file.read(1 << 16))
            file.seek(max(0, size - (1 << 16)))
            digest.update(file.read())
        return f"{size}:{digest.hexdigest()[:32]}"


@dataclass(frozen=True)
class TextSource:
    """One split of a source.

    `part` says which documents belong to it where training and held-out text share files, by the hash of each document.
    """

    name: str
    files: tuple[TextFile, ...]
    part: Literal["all", "train", "held_out"] = "all"
    where: Source | None = None
    """The place in the recipe that names the source."""
    columns: Columns = field(default_factory=Columns)
    trusted: bool = False
    """Whether tpshard made and verified the files, so that they are not read before the first step."""

    def keeps(self, text: str) -> bool:
        """Whether a document belongs to this split."""
        if self.part == "all":
            return True
        held_out = hashlib.sha256(text.encode()).digest()[-1] % HELD_OUT == 0
        return held_out == (self.part == "held_out")

    @property
    def readable(self) -> str:
        """A sentence on what makes a row readable, for the fix of an error."""
        return self.columns.readable

    def mistake(self, message: str, *, why: str = "", fix: str = "") -> Mistakes:
        """An error (exit 6) at the place of the recipe that names the source."""
        return Mistakes.one(message, exit=Exit.DATA, where=self.where, why=why, fix=fix)


@dataclass(frozen=True)
class Corpus:
    """A source's training text, its held-out text, and its tokenizer if it has one (the sample does)."""

    train: TextSource
    held_out: TextSource
    tokenizer: Path | None = None


def open_text(
    source: str, columns: Columns | None = None, *, where: Source | None = None, fallback: Path | None = None,
    split: str | None = None, key: str = "data.source",
) -> Corpus:  # fmt: skip
    """The corpus of a source.

    Args:
        source: `sample`, `c4`, `hub:OWNER/NAME` or `hub:OWNER/NAME:CONFIGURATION`, or a folder, file or pattern.
        columns: the keys or columns that are read, by default `text`; plain text has none.
        where: the place in the recipe that names the source, for errors.
        fallback: a folder for the sample where the user's cache cannot be written.
        split: the split of a hub data set that is trained on, or a word in the names of those files.
        key: the recipe's key or the command's option that names the source, for errors.

    Raises:
        Mistakes: exit 6; no such files, of several formats, or the hub cannot be reached.
    """
    columns = columns or Columns()
    if source == "sample":
        sample = ensure_sample(fallback)
        corpus = _local(str(sample.directory), where, key)
        train, held_out = (
            replace(text, name="sample", trusted=True, columns=columns) for text in (corpus.train, corpus.held_out)
        )
        return Corpus(train, held_out, sample.tokenizer)
    name = C4 if source == "c4" else source
    corpus = _hub(name, where, key, split) if hub.is_on(name) else _local(source, where, key, split)
    plain = next((file.name for file in corpus.train.files if text_format(file).name == "plain text"), None)
    if plain is not None and columns.key != "column":
        fix = "*.jsonl, *.json.gz or *.parquet"
        raise corpus.train.mistake(f"{plain} of {source} is plain text, which has no `{columns.required[0]}`", fix=fix)
    return Corpus(replace(corpus.train, columns=columns), replace(corpus.held_out, columns=columns))


def rows(text: TextSource, file: TextFile, start: int = 0, sums: ShardSums | None = None) -> Iterator[TextRow]:
    """The rows of one file from number `start` on, without blank ones.

    sums: sums of the files read so far, with which this one's is compared and kept.

    Raises:
        Mistakes: exit 6 where the file cannot be read to its end (gone, cut short, not gzip, connection lost), has
            no column of the recipe's name, or has changed since it was read.
    """
    last = -1
    try:
        with open_decompressed(file.name, _watched(text, file, sums)) as stream:
            for row in text_format(file).rows(stream, text.columns, start):
                last = row.number
                yield row
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise  # a limit of this process, not of the file
        cut = isinstance(error, EOFError)
        raise text.mistake(
            f"{file.name} of {text.name} {'ends in the middle' if cut else 'cannot be read'}, after {last + 1} rows",
            why=f"{type(error).__name__}: {error}",
            fix="fetch the file again, or remove it from the source",
        ) from error
    except NoColumn as error:
        message, fix = (
            f"{file.name} of {text.name} has no `{error.column}`",
            f"correct {text.columns.key_of(error.column)}",
        )
        raise text.mistake(message, why=str(error), fix=fix) from error


def _watched(text: TextSource, file: TextFile, sums: ShardSums | None) -> BinaryIO:
    """The file's bytes as stored, summed while they are read."""
    if sums is None:
        return file.open()

    def changed() -> Mistakes:
        return text.mistake(
            f"{file.name} of {text.name} has changed since it was read",
            why="the part that was read before has another sha256",
            fix="restore it; resume=force accepts it; run.dir=DIR starts another run",
        )

    if text_format(file).from_start:
        return sums.read(file.name, file.open(), changed)
    if isinstance(file.place, Path):
        sums.check(file.name, file.place, changed)
    return file.open()


def sum_whole(text: TextSource, files: Sequence[TextFile], sums: ShardSums) -> None:
    """Sums local files that are SUMMED bytes in all at most, of which a run may stop before it has read them."""
    paths = {file.name: file.place for file in files if isinstance(file.place, Path)}
    if text.trusted or sum(path.stat().st_size for path in paths.values()) > SUMMED:
        return

    def changing(name: str) -> Mistakes:
        return text.mistake(f"{name} changes while it is read", fix="start again when nothing writes into it")

    for name, path in paths.items():
        sums.check(name, path, partial(changing, name))


def is_empty(text: TextSource, file: TextFile) -> bool:
    """Whether a local file has no document of this split. A large one counts as having some from its first unreadable
    row on: a run judges those as it reads."""
    if text.trusted or not isinstance(file.place, Path):
        return False
    large = file.place.stat().st_size > SMALL
    return not any(large if row.text is None else text.keeps(row.text) for row in rows(text, file))


def text_format(file: TextFile) -> TextFormat:
    one = format_of(file.name)
    assert one is not None, f"{file.name} was accepted without a format"
    return one


def pieces(text: str) -> Iterator[str]:
    """Cuts `text` into pieces of at most PIECE characters, after white space where there is some near the end."""
    start = 0
    while len(text) - start > PIECE:
        end = start + PIECE
        space = max(text.rfind(" ", end - 1000, end), text.rfind("\n", end - 1000, end))
        end = space + 1 if space >= 0 else end
        yield text[start:end]
        start = end
    yield text[start:]


def _local(source: str, where: Source | None, key: str, split: str | None = None) -> Corpus:
    try:
        paths = _files_of(source)
        message = f"{key}: no file matches {source}" if _is_pattern(source) else f"{key}: there is no {source}"
        if Path(source).expanduser().is_dir():
            message = f"{key}: the folder {source} has no *{', *'.join(SUFFIXES)}"
    except (OSError, RuntimeError) as error:  # too long a name, no permission, or no home directory of that user
        paths = []
        message = f"{key}: {source} cannot be looked up: {getattr(error, 'strerror', None) or error}"
    if not paths:
        raise Mistakes.one(message, exit=Exit.DATA, where=where, why=looked_for(source, where), fix=ANY_SOURCE)
    names = _names(list(map(str, paths)))
    files = [TextFile(name, path) for name, path in zip(names, paths)]
    _check_formats(source, names, where, key)
    if split is None:
        return _split(source, files, where)
    train = tuple(file for file in files if split in file.name)
    if not train:
        fix = f"its files are {', '.join(names[:3])}{', ...' if names[3:] else ''}"
        raise Mistakes.one(f"no file of {source} is of the split {split!r}", exit=Exit.DATA, where=where, fix=fix)
    held_out = _split(source, files, where).held_out
    if held_out.part == "all" and not {file.name for file in train} & {file.name for file in held_out.files}:
        return Corpus(TextSource(source, train, where=where), held_out)
    return _split(source, train, where)


def _files_of(source: str) -> list[Path]:
    """The files of a folder or pattern."""
    path = Path(source).expanduser()
    if path.is_dir():
        return sorted(
            [p for p in path.glob("*") if _ends(p, SUFFIXES)] or [p for p in path.rglob("*") if _ends(p, SUFFIXES)]
        )
    if path.is_file():
        return [path]
    if not _is_pattern(source):
        return []
    root = Path(path.anchor or ".")
    return sorted(p for p in root.glob(str(path.relative_to(root) if path.anchor else path)) if p.is_file())


def _is_pattern(source: str) -> bool:
    return any(c in source for c in "*?[")


def _ends(path: Path, suffixes: Sequence[str]) -> bool:
    return path.name.lower().endswith(tuple(suffixes)) and path.is_file()


def _names(paths: Sequence[str]) -> Sequence[str]:
    """The names of files without their folders, or with them where two would have the same."""
    short = [path.rsplit("/", 1)[-1] for path in paths]
    return short if len(set(short)) == len(short) else paths


def _check_formats(source: str, names: Sequence[str], where: Source | None, key: str) -> None:
    """Raises `Mistakes` for files of no known format, or of several."""
    formats = {name: format_of(name) for name in names}
    unknown = [name for name, one in formats.items() if one is None]
    if unknown:
        more = f", and {len(unknown) - 1} more" if unknown[1:] else ""
        message = f"{key}: {unknown[0]} of {source} has no known format{more}"
        raise Mistakes.one(message, exit=Exit.DATA, where=where, fix=ANY_SOURCE)
    counts = Counter(one.name for one in formats.values() if one is not None)
    if len(counts) > 1:
        raise Mistakes.one(
            f"{key}: {source} has files of several formats",
            exit=Exit.DATA,
            where=where,
            why=", ".join(f"{count} of {name}" for name, count in counts.most_common()),
            fix="choose one by a pattern, such as `texts/*.jsonl`",
        )


def _split(name: str, files: Sequence[TextFile], where: Source | None) -> Corpus:
    held_out = [f for f in files if any(word in f.name for word in ("validation", "held_out", "heldout"))]
    train = [f for f in files if f not in held_out]
    if not (held_out and train) and len(files) >= HELD_OUT:
        train, held_out = list(files[:-1]), list(files[-1:])
    if held_out and train:
        return Corpus(TextSource(name, tuple(train), where=where), TextSource(name, tuple(held_out), where=where))
    return Corpus(TextSource(name, tuple(files), "train", where), TextSource(name, tuple(files), "held_out", where))


def _hub(source: str, where: Source | None, key: str, split: str | None = None) -> Corpus:
    repo, configuration, revision = hub.name_of(source)
    place = hub.place_of(source, where)
    try:
        import datasets

        datasets.disable_progress_bars()
        here = {"revision": revision} if place == repo else {}
        urls = datasets.load_dataset_builder(place, configuration, **here).config.data_files or {}
        if not any(urls.values()):
            raise FileNotFoundError("it has no data files")
    except Exception as error:  # network, hub, login and cache raise many types; all mean that there is no data
        raise Mistakes.one(
            f"{source.partition(':')[2]} cannot be read from the hub",
            exit=Exit.DATA,
            where=where,
            why=why_not(error),
            fix=hub.CONFIGURATION if isinstance(error, ValueError) else hub.FIX,
        ) from error
    files = {name: _hub_files(sorted(urls[name]), place, source, where, key) for name in urls}
    train = split or ("train" if len(files) > 1 else next(iter(files)))
    if train not in files:
        message, fix = f"{repo} has no split {train!r}", f"its splits are {', '.join(files)}"
        if split is None:
            fix += f"; `data.sources: [{{source: {source}, split: {next(iter(files))}}}]` reads one"
        raise Mistakes.one(message, exit=Exit.DATA, where=where, fix=fix)
    beside = [train.replace("train", word) for word in ("validation", "test")]  # train_sft: validation_sft, test_sft
    others = (name for name in (*beside, "validation", "test") if name in files and name != train)
    if (held_out := next(others, None)) is None:
        return _split(repo, files[train], where)
    return Corpus(TextSource(repo, files[train], where=where), TextSource(repo, files[held_out], where=where))


def _hub_files(urls: Sequence[str], place: str, source: str, where: Source | None, key: str) -> tuple[TextFile, ...]:
    # without the revision: a new README in the data set must not look like new text
    cached = not urls[0].startswith("hf://")
    paths = [
        url.removeprefix(f"{place}/") if cached else url.partition("@")[2].partition("/")[2] or url for url in urls
    ]
    names = _names(paths)
    _check_formats(source, names, where, key)
    identities = {} if cached else hub.identities(urls)
    return tuple(TextFile(n, Path(url) if cached else url, identities.get(url, "")) for n, url in zip(names, urls))
