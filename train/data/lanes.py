"""The two halves of the token stream: chains read files, lanes pack documents into rows. See `stream`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpshard.models.objectives.loss import IGNORE
from tpshard.train.data.corpus import BadRows, TextSource, pieces, rows
from tpshard.train.data.shard_sums import ShardSums
from tpshard.train.data.tokens import TextTokenizer


class LanePlace(NamedTuple):
    """The place of a document (or of a piece of one) in its chain. Places are ordered as they are read."""

    epoch: int = 0
    number: int = 0
    """The document's number in its epoch."""
    file: int = 0
    """Index into the chain's list of files."""
    row: int = 0
    """The number of the row in the file."""
    piece: int = 0


class Document(NamedTuple):
    """A document of the text, or one piece of a long one."""

    place: LanePlace
    text: str
    first: bool
    last: bool


class Chain:
    """Reads a list of files in turn, again and again, and deals their documents to lanes.

    Args:
        files: indices into `text.files`.
        lanes: the number of lanes that share the chain, over all ranks.
        local: the lanes (0..lanes-1) of this rank; documents of others are dropped.
        start: the earliest place that a local lane needs.
        once: whether to stop after one epoch.
        sums: sums of the files, compared and kept as they are read.
    """

    def __init__(
        self,
        text: TextSource,
        files: Sequence[int],
        lanes: int,
        local: Sequence[int],
        start: LanePlace,
        bad: BadRows,
        once: bool,
        sums: ShardSums,
    ):
        self.text, self.files, self.lanes, self.start, self.bad, self.once = text, files, lanes, start, bad, once
        self.sums = sums
        self.waiting: dict[int, deque[Document]] = {lane: deque() for lane in local}
        self._documents = self._read()

    def next_of(self, lane: int) -> Document | None:
        """The lane's next document; None at the end of a chain read once."""
        while not self.waiting[lane]:
            document = next(self._documents, None)
            if document is None:
                return None
            owner = (document.place.number + document.place.epoch) % self.lanes
            if owner in self.waiting:
                self.waiting[owner].append(document)
        return self.waiting[lane].popleft()

    def _read(self) -> Iterator[Document]:
        at = self.start
        while True:
            yield from self._epoch(at)
            if self.once:
                return
            at = LanePlace(at.epoch + 1)

    def _epoch(self, at: LanePlace) -> Iterator[Document]:
        count = at.number
        for position in range(at.file, len(self.files)):
            file = self.text.files[self.files[position]]
            resumed = position == at.file and at.row > 0
            for row in rows(self.text, file, at.row if resumed else 0, self.sums):
                if at.epoch == 0:
                    self.bad.see(file, row)
                if row.text is None or not self.text.keeps(row.text):
                    continue
                parts = list(pieces(row.text))
                skip = at.piece if position == at.file and row.number == at.row else 0
                for number in range(skip, len(parts)):
                    place = LanePlace(at.epoch, count, position, row.number, number)
                    yield Document(place, parts[number], number == 0, number == len(parts) - 1)
                    count += 1
            if at.epoch == 0 and not resumed:
                self.bad.file_ended()
        if count == 0 and not self.once:
            raise self.text.mistake(
                f"{self.text.name} has no readable document",
                why=", ".join(self.text.files[i].name for i in self.files[:3]) + (", ..." if self.files[3:] else ""),
                fix=self.text.readable,
            )


@dataclass
class PackedRow:
    """One row as lists of seq_len integers. `origin` lists the lines of files in it, in order."""

    tokens: list[int]
    targets: list[int]
    documents: list[int]
    positions: list[int]
    origin: dict[str, None]

    def extend(self, tokens: list[int], after: list[int], document: int) -> None:
        """Appends part of a document with its targets: `after` are the tokens that follow, one fewer at the document's
        end."""
        self.tokens += tokens
        self.targets += after + [IGNORE] * (len(tokens) - len(after))
        self.documents += [document] * len(tokens)
        self.positions += range(len(tokens))


class Lane:
    """Packs its documents, in order, into rows of seq_len tokens: one row of every step."""

    def __init__(self, number: int, chain: Chain, tokenizer: TextTokenizer, at: tuple[LanePlace, int] | None):
        self.number, self.chain, self.tokenizer = number, chain, tokenizer
        self.place: LanePlace | None = at[0] if at else None
        self.offset = at[1] if at else 0
        self.ids: list[int] | None = None
        """Token ids of the document at `place`; None where it is not read yet (at the start, and after a resume)."""

    def row(self, seq_len: int) -> PackedRow:
        """The next row, padded where a chain that is read once has ended."""
        row = PackedRow([], [], [], [], {})
        while (left := seq_len - len(row.tokens)) > 0:
            number = row.documents[-1] + 1 if row.documents else 0
            if (self.ids is None or self.offset >= len(self.ids)) and not self._next():
                row.extend([self.tokenizer.end] * left, [], number)
                break
            assert self.ids is not None and self.place is not None
            part = self.ids[self.offset : self.offset + left]
            row.extend(part, self.ids[self.offset + 1 : self.offset + 1 + len(part)], number)
            self.offset += len(part)
            file = self.chain.text.files[self.chain.files[self.place.file]].name
            row.origin[f"{file}:{self.place.row + 1}"] = None
        return row

    def _next(self) -> bool:
        awaited = self.place if self.ids is None else None
        while document := self.chain.next_of(self.number):
            if awaited is not None and document.place < awaited:
                continue  # the chain resumed at an earlier lane's place
            if document.place != awaited:
                self.offset = 0
            self.place = document.place
            self.ids = self.tokenizer.document(document.text, first=document.first, last=document.last)
            return True
        return False
