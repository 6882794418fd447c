"""The two halves of the token stream: chains read files, lanes pack documents into rows. See `stream`."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol

from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.models.objectives.targets import IGNORE
from tpshard.train.data.bad_rows import BadRows
from tpshard.train.data.corpus import TextFile, TextSource, rows
from tpshard.train.data.row_columns import Labelled, NotLearned, TextRow, in_words
from tpshard.train.data.shard_sums import ShardSums

GOLDEN = 0.6180339887498949
"""The step of the sequence by which lanes choose sources: any stretch of it covers 0 to 1 evenly (Weyl)."""


class RowTokenizer(Protocol):
    """What turns rows into labelled tokens: `TextTokenizer` or `AnswerTokenizer`."""

    @property
    def end(self) -> int: ...
    @property
    def whole(self) -> bool: ...
    def pieces(self, text: str) -> Iterator[str] | Sequence[str]: ...
    def labelled(self, text: str, *, first: bool = True, last: bool = True) -> Labelled: ...


class LanePlace(NamedTuple):
    """The place of a document (or of a piece of one) in its chain, from which the chain can read on. Places are ordered
    as documents are dealt."""

    epoch: int = 0
    number: int = 0
    """The document's number in its epoch."""
    file: int = 0
    """Index into the chain's list of files in this epoch; where documents are shuffled, of the first of the window."""
    row: int = 0
    """The number of that row in the file."""
    piece: int = 0


DocumentKey = tuple[int, int, int]
"""A document of a source: the index into its files, the row, the piece."""


class Document(NamedTuple):
    """A document of the text, or one piece of a long one."""

    place: LanePlace
    text: str
    first: bool
    last: bool
    file: TextFile
    row: int
    key: DocumentKey


class Chain:
    """Reads a list of files in turn, again and again, and deals their documents to lanes.

    Args:
        files: indices into `text.files`.
        lanes: the number of lanes that share the chain, over all ranks.
        local: the lanes (0..lanes-1) of this rank; documents of others are dropped.
        start: the earliest place that a local lane needs.
        epochs: how often the files are read; None: for ever.
        sums: sums of the files, compared and kept as they are read.
        window: documents that are shuffled among each other, by `seed` and epoch; 1: none.
        lengths: the tokens of every document where they were counted before, so that only those of own rows are
            tokenized; what cannot be read or learned from was counted then too.
    """

    def __init__(
        self, text: TextSource, files: Sequence[int], lanes: int, local: Sequence[int], start: LanePlace, bad: BadRows,
        epochs: int | None, sums: ShardSums, tokenizer: RowTokenizer, window: int = 1, seed: int = 0,
        lengths: Mapping[DocumentKey, int] | None = None,
    ):  # fmt: skip
        self.lengths = lengths
        self.text, self.files, self.lanes, self.start, self.bad, self.epochs = text, files, lanes, start, bad, epochs
        self.sums, self.tokenizer, self.window, self.seed = sums, tokenizer, window, seed
        self.unlearned = BadRows(text, bad.limit)
        """Rows that can be read and not learned from."""
        self.notes: Counter[str] = Counter()
        """What was done to documents of local lanes that were not taken as they are."""
        self.waiting: dict[int, deque[Document]] = {lane: deque() for lane in local}
        self._documents = self._read()

    def next_of(self, lane: int) -> Document | None:
        """The lane's next document; None at the end of a chain that is read so often."""
        while not self.waiting[lane]:
            document = next(self._documents, None)
            if document is None:
                return None
            owner = (document.place.number + document.place.epoch) % self.lanes
            if owner in self.waiting:
                self.waiting[owner].append(document)
        return self.waiting[lane].popleft()

    def tokens_of(self, document: Document, *, counts: bool) -> Labelled:
        """A document's tokens; none where nothing of it can be learned. counts: what is done to it is counted."""
        try:
            labelled, fault = self.tokenizer.labelled(document.text, first=document.first, last=document.last), ""
        except NotLearned as error:
            labelled, fault = Labelled([], []), str(error)
        if counts:
            self.unlearned.see(document.file, TextRow(document.row, None if fault else document.text, fault))
            self.notes.update(labelled.counted)
        return labelled

    def _read(self) -> Iterator[Document]:
        at = self.start
        while self.epochs is None or at.epoch < self.epochs:
            yield from self._epoch(at)
            at = LanePlace(at.epoch + 1)

    def nothing_to_learn(self) -> Mistakes:
        """The error of a text of which every document is left out."""
        fix = self.text.readable if self.unlearned.first else "a larger model.seq_len, or data.too_long"
        why = self.unlearned.first or "; ".join(in_words(note, n) for note, n in self.notes.items())
        return self.text.mistake(f"{self.text.name} has nothing to learn from", why=why, fix=fix)

    def _epoch(self, at: LanePlace) -> Iterator[Document]:
        count, window = at.number - at.number % self.window, []
        for place, document in self.in_order(at):
            window.append((place, document))
            if len(window) == self.window:
                yield from self._shuffled(window, count)
                count, window = count + len(window), []
        yield from self._shuffled(window, count)
        if count + len(window) == 0 and self.epochs is None:
            names = ", ".join(self.text.files[i].name for i in self.files[:3]) + (", ..." if self.files[3:] else "")
            if self.bad.rows_read > self.bad.bad and self.text.part != "all":
                raise self.text.mistake(
                    f"no document of {self.text.name} is in its {self.text.part.replace('_', '-')} part", why=names,
                    fix="more text; one document in so many is held out, by its content, unless a file is named so",
                )  # fmt: skip
            raise self.text.mistake(f"{self.text.name} has no readable document", why=names, fix=self.text.readable)

    def _shuffled(self, window: list[tuple[LanePlace, Document]], count: int) -> Iterator[Document]:
        """The documents of a window, whose first has the number `count`, in the order of its epoch."""
        order = list(range(len(window)))
        if self.window > 1 and window:
            random.Random(f"{self.seed}:{window[0][0].epoch}:{count}:{self.files[0]}").shuffle(order)
        for number, i in enumerate(order, count):
            yield window[i][1]._replace(place=window[0][0]._replace(number=number))

    def in_order(self, at: LanePlace) -> Iterator[tuple[LanePlace, Document]]:
        """The documents as they stand in the files, from a place on, each with its own place."""
        files = list(self.files)
        if self.window > 1:
            random.Random(f"{self.seed}:{at.epoch}:{files[0]}").shuffle(files)
        for position in range(at.file, len(files)):
            file = self.text.files[files[position]]
            resumed = position == at.file and at.row > 0
            for row in rows(self.text, file, at.row if resumed else 0, self.sums):
                if at.epoch == 0 and self.lengths is None:
                    self.bad.see(file, row)
                if row.text is None or not self.text.keeps(row.text):
                    continue
                parts = list(self.tokenizer.pieces(row.text))
                skip = at.piece if position == at.file and row.number == at.row else 0
                for number in range(skip, len(parts)):
                    place = LanePlace(at.epoch, 0, position, row.number, number)
                    last = number == len(parts) - 1
                    key = (files[position], row.number, number)
                    yield place, Document(place, parts[number], number == 0, last, file, row.number, key)
            if at.epoch == 0 and not resumed and self.lengths is None:
                self.bad.file_ended()


@dataclass
class PackedRow:
    """One row as lists of seq_len integers. `origin` lists the lines of files in it, in order."""

    tokens: list[int]
    targets: list[int]
    documents: list[int]
    positions: list[int]
    origin: dict[str, None]

    def extend(self, tokens: list[int], after: list[int], document: int) -> None:
        """Appends part of a document with its targets: `after` are the labels of the tokens that follow, one fewer at
        the document's end."""
        self.tokens += tokens
        self.targets += after + [IGNORE] * (len(tokens) - len(after))
        self.documents += [document] * len(tokens)
        self.positions += range(len(tokens))


class Feed:
    """The documents of one source for one lane, in order, and how far the last of them is packed."""

    def __init__(self, number: int, chain: Chain, at: tuple[LanePlace, int] | None):
        self.number, self.chain = number, chain
        self.place: LanePlace | None = at[0] if at else None
        self.offset = at[1] if at else 0
        self.document: Document | None = None
        """The document at `place`; None where it is not read yet (at the start, and after a resume)."""
        self.tokens: Labelled | None = None
        """Its tokens; None where only their number is known."""
        self.length = 0
        """The number of its tokens."""

    @property
    def origin(self) -> str:
        """The line of a file that the document is from."""
        return f"{self.document.file.name}:{self.document.row + 1}" if self.document is not None else ""

    @property
    def pending(self) -> bool:
        """Whether a part of the document is still to be packed."""
        if self.document is None and self.place is not None:
            self._next()
        return self.offset < self.length

    def advance(self) -> bool:
        """Goes on to the next document; False where there is none. Raises Mistakes where an epoch has none to learn
        from."""
        return (self.document is not None or self.place is None or self._next()) and self._next()

    def _next(self) -> bool:
        awaited, begun = self.place if self.document is None else None, None
        while document := self.chain.next_of(self.number):
            place, chain = document.place, self.chain
            if awaited is not None and place < awaited:
                continue  # the chain resumed at an earlier lane's place
            begun = place.epoch if begun is None else begun
            if chain.lengths is None:
                tokens = chain.tokens_of(document, counts=place != awaited and place.epoch == 0)
                length = len(tokens.ids)
            else:
                tokens, length = None, chain.lengths[document.key]
            if length:
                self.offset = self.offset if place == awaited else 0
                self.place, self.document, self.tokens, self.length = place, document, tokens, length
                return True
            if place.epoch > begun + 1:
                raise chain.nothing_to_learn()
        return False

    def take(self, most: int, read: bool) -> tuple[list[int], list[int]]:
        """The next tokens of the document, at most so many, and the labels of those that follow each. Without `read`
        they are only counted, and zeros stand for them."""
        assert self.document is not None
        at, self.offset = self.offset, min(self.offset + most, self.length)
        if self.tokens is None and read:
            self.tokens = self.chain.tokens_of(self.document, counts=False)
        if self.tokens is None:
            return [0] * (self.offset - at), []
        return self.tokens.ids[at : self.offset], self.tokens.labels[at + 1 : self.offset + 1]


class Lane:
    """Packs documents into rows of seq_len tokens: one row of every step.

    The next document is of the source that is next by the weights: of the lane's documents, or of their tokens. Which
    that is follows from the lane's own history, so that it is the same on any mesh.
    """

    def __init__(
        self, number: int, feeds: Sequence[Feed], weights: Sequence[float], by: Literal["rows", "tokens"], seed: int,
        state: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        self.feeds, self.weights, self.by = feeds, weights, by
        self._phases = [_phase(seed, number, i) for i in range(len(feeds))]
        state = state or {}
        self.turn: int = state.get("turn", 0)
        """The source of the document that is being packed."""
        self.chosen: int = state.get("chosen", 0)
        """How many documents were chosen."""
        self.taken: list[int] = list(state.get("taken", [0] * len(feeds)))
        """Tokens of each source."""
        self.ended: set[int] = set(state.get("ended", ()))
        """Sources that have no more documents."""

    def state(self) -> Any:
        """The lane's position as JSON: of one source five numbers and how far the document is packed."""
        state = self.full_state()
        return state["feeds"][0] if len(self.feeds) == 1 else state

    def full_state(self) -> dict[str, Any]:
        """The lane's position as JSON, for any number of sources."""
        feeds = [None if feed.place is None else [*feed.place, feed.offset] for feed in self.feeds]
        more = {"turn": self.turn, "chosen": self.chosen, "taken": list(self.taken), "ended": sorted(self.ended)}
        return {"feeds": feeds, **more}

    @property
    def epoch(self) -> int:
        """The epoch of the source that began again most often."""
        return max((feed.place.epoch for feed in self.feeds if feed.place), default=0)

    def row(self, seq_len: int, end: int, read: bool = True) -> PackedRow:
        """The next row, padded by `end` where no document is left, or the next is packed whole and does not fit.
        Without `read` it is a row of another rank, of which nothing need be tokenized."""
        row = PackedRow([], [], [], [], {})
        while (left := seq_len - len(row.tokens)) > 0:
            number = row.documents[-1] + 1 if row.documents else 0
            feed = self._current()
            whole = feed is not None and feed.chain.tokenizer.whole and feed.offset == 0
            if feed is None or (whole and row.tokens and left < feed.length):
                row.extend([end] * left, [], number)
                break
            row.extend(*feed.take(left, read), number)
            row.origin[feed.origin] = None
        return row

    def _current(self) -> Feed | None:
        """The feed whose document is packed next; None where none has any."""
        if self.feeds[self.turn].pending:
            return self.feeds[self.turn]
        while len(self.ended) < len(self.feeds):
            self.turn = self._choose()
            feed = self.feeds[self.turn]
            if feed.advance():
                self.taken[self.turn] += feed.length
                return feed
            self.ended.add(self.turn)
        return None

    def _choose(self) -> int:
        left = [i for i in range(len(self.feeds)) if i not in self.ended]
        total = sum(self.weights[i] for i in left)
        self.chosen += 1
        if len(left) == 1:
            return left[0]
        if self.by == "tokens" and (read := sum(self.taken)):
            # the source that is furthest behind; lanes differ by up to a document of a mean length, without favour to
            # any source, so that a rare one is not late in all of them
            length = read / (self.chosen - 1)
            taken = {i: self.taken[i] - (self._phases[i] - 0.5) * length for i in left}
            return max(left, key=lambda i: self.weights[i] / total * sum(taken.values()) - taken[i])
        point = (self._phases[0] + self.chosen * GOLDEN) % 1 * total
        for i in left:
            point -= self.weights[i]
            if point < 0:
                return i
        return left[-1]


@cache
def _phase(seed: int, lane: int, source: int) -> float:
    """A number from 0 to 1 that differs between lanes and sources."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{lane}:{source}".encode()).digest()[:6], "big") / 2**48
