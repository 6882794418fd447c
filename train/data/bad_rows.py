"""Rows that cannot be read: counted, and refused where there are too many."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tpshard.diagnostics.diagnostic import plural
from tpshard.train.data.corpus import SMALL, TextFile, TextSource, logger, rows, text_format
from tpshard.train.data.row_columns import Labelled, NotLearned, TextRow, in_words
from tpshard.train.data.shard_sums import ShardSums

UNREADABLE = "unreadable: left out"
SMALL_CONVERSATIONS, TRIED = 4 << 20, 1000
"""Bytes; conversations of local data up to this size are all rendered once before the first step, and else so many."""


class BadRows:
    """Counts unreadable rows, and stops the run when their share is above `limit`.

    The share is checked at the end of each file, and earlier once there are too many bad rows for the first thousand,
    so that a file of garbage is not read to its end.
    """

    def __init__(self, text: TextSource, limit: float, *, warn: bool = True):
        self.text, self.limit, self.warn = text, limit, warn
        self.rows_read = self.bad = 0
        self.first = ""
        """The first unreadable row: file, line, fault."""

    def see(self, file: TextFile, row: TextRow) -> None:
        """Counts a row; the first unreadable one is logged, and too many stop the run."""
        self.rows_read += 1
        if row.text is not None:
            return
        self.bad += 1
        if not self.first:
            self.first = f"{file.name}, {text_format(file).unit} {row.number + 1}: {row.fault}"
            if self.warn:
                logger.warning("skipped an unreadable row of %s: %s", self.text.name, self.first)
        self._judge(max(self.rows_read, 1000))

    def file_ended(self) -> None:
        """Judges the share of unreadable rows at the end of a file."""
        if self.bad:
            self._judge(self.rows_read)

    def _judge(self, of: int) -> None:
        if self.bad > self.limit * of:
            raise self.text.mistake(
                f"{self.bad} of {self.rows_read} rows of {self.text.name} are unreadable",
                why=f"the first: {self.first}",
                fix=f"{self.text.readable}; repair the data, or raise data.bad_rows (now {self.limit:g})",
            )


def peek(
    text: TextSource, bad_rows: float, rows_read: int = 100, learn: Callable[[str], Labelled | None] | None = None
) -> None:
    """Checks small local data wholly, and of larger data the first rows. Raises `Mistakes` (exit 6).

    learn: tried on the first rows, and on up to TRIED until there is one of which something is left; it encodes them or
    only renders them, and raises NotLearned.
    """
    left_out: list[str] = []
    check(text, bad_rows)
    counter = BadRows(text, 1.0 if learn is None else bad_rows, warn=False)
    every = ((file, row) for file in text.files for row in rows(text, file))
    for file, row in itertools.islice(every, TRIED):
        if counter.rows_read >= rows_read and counter.bad + len(left_out) < counter.rows_read:
            break
        try:
            if learn is not None and row.text is not None and (one := learn(row.text)) is not None and not one.ids:
                left_out.append(one.note)
        except NotLearned as fault:
            row = replace(row, text=None, fault=str(fault))
        counter.see(file, row)
    if counter.rows_read < rows_read:  # that was all
        counter.file_ended()
    if counter.rows_read == counter.bad:
        raise text.mistake(f"{text.name} has no readable row", why=counter.first, fix=text.readable)
    if left_out and counter.bad + len(left_out) == counter.rows_read < TRIED:
        fix = "a larger model.seq_len, or data.too_long"
        raise text.mistake(f"{text.name} has nothing to learn from", why=left_out[0], fix=fix)


def check(
    text: TextSource, bad_rows: float, sums: ShardSums | None = None, learn: Callable[[str], Labelled] | None = None
) -> list[str]:
    """Reads small local data once, so that its errors, and what has changed in it, show before the first step.

    learn: encodes a row; tried on rows of conversations, of very many only on the first.

    Returns: how many rows are unreadable, and what was done to conversations that were not taken as they are, such as
    cutting them; each with the first of them.
    """
    paths = [file.place for file in text.files if isinstance(file.place, Path)]
    try:
        size = sum(path.stat().st_size for path in paths)
    except OSError as error:
        fix = "check who may read it, or remove it from the source"
        raise text.mistake(f"a file of {text.name} cannot be read", why=str(error), fix=fix) from error
    if text.trusted or len(paths) < len(text.files) or size > SMALL:
        return []
    notes: Counter[str] = Counter()
    firsts: dict[str, str] = {}
    counter = BadRows(text, bad_rows, warn=False)
    left = TRIED if size > SMALL_CONVERSATIONS else size
    for file in text.files:
        for row in rows(text, file, sums=sums):
            if learn is not None and row.text is not None and text.keeps(row.text) and left > 0:
                left -= 1
                try:
                    for note, n in learn(row.text).counted.items():
                        notes[note] += n
                        firsts.setdefault(note, f"{file.name}, {text_format(file).unit} {row.number + 1}")
                except NotLearned as fault:
                    row = replace(row, text=None, fault=str(fault))
            counter.see(file, row)
        counter.file_ended()
    if counter.rows_read == counter.bad:
        raise text.mistake(
            f"{text.name} has no readable row",
            why=counter.first or text.columns.none_left or f"{plural(len(paths), 'file')}, all empty",
            fix=text.readable if counter.first else "a source with rows, or another filter",
        )
    told = [f"{text.name}: {in_words(note, n)} (the first: {firsts[note]})" for note, n in notes.items()]
    if counter.bad:
        told.append(f"{text.name}: {plural(counter.bad, 'row')} {UNREADABLE} (the first: {counter.first})")
    return told
