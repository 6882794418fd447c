"""One source of a mixture as a data rank reads it: its files in order, their sums, and its lanes' documents; and the
rows of whole epochs of all sources."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.train.data.bad_rows import BadRows, check
from tpshard.train.data.conversations import AnswerTokenizer
from tpshard.train.data.corpus import TextSource, is_empty, rows, sum_whole
from tpshard.train.data.lanes import Chain, DocumentKey, Feed, Lane, LanePlace, PackedRow
from tpshard.train.data.row_columns import Labelled, NotLearned
from tpshard.train.data.shard_sums import ShardSums
from tpshard.train.data.tokens import TextTokenizer

logger = logging.getLogger(__name__)

CHAINS = 64
"""The maximal number of files of a source open at once over all ranks; a rank opens those of its own rows."""


class TooLittle(Mistakes):
    """The text is smaller than one batch, and is read without end."""


class SourceReader:
    """Opens the files of a source for the lanes of one rank. `prefix` is put before file names in saved positions.

    Raises `Mistakes` (exit 6), here or from its feeds: unreadable files, too many bad rows.
    """

    def __init__(
        self, text: TextSource, tokenizer: TextTokenizer | AnswerTokenizer, epochs: int | None, lanes: int,
        part: Sequence[int], window: int, seed: int, bad_rows: float, prefix: str = "", checks: bool = True,
    ):  # fmt: skip
        self.text, self.tokenizer, self.epochs, self.lanes, self.part = text, tokenizer, epochs, lanes, part
        self.window, self.seed, self.prefix, self.checks = window, seed, prefix, checks
        self.bad, self.sums = BadRows(text, bad_rows), ShardSums()
        self.warnings: list[str] = []
        if checks:
            self.warnings += check(text, bad_rows, self.sums, tokenizer.labelled if tokenizer.whole else None)
        self.order = self._order()
        self.chain_count = _chain_count(lanes, len(self.order))
        self.chains: list[Chain] = []
        self.measured: list[Chain] = []
        """The chain that read everything once to count tokens."""
        self.lengths: dict[DocumentKey, int] | None = None
        """The tokens of every document, once they are counted."""
        self.files = {prefix + file.name: file.fingerprint() for file in text.files}
        self.times = {prefix + f.name: f.place.stat().st_mtime_ns for f in text.files if isinstance(f.place, Path)}
        self._sum_whole()

    @property
    def notes(self) -> Counter[str]:
        """What was done to documents that were not taken as they are."""
        return sum((chain.notes for chain in self.measured or self.chains), Counter())

    def _sum_whole(self) -> None:
        """Sums the files of this rank's rows, unless they are large."""
        numbers = {row * self.chain_count // self.lanes for row in self.part}
        own = [self.text.files[i] for number in sorted(numbers) for i in self.order[number :: self.chain_count]]
        if self.checks:
            sum_whole(self.text, own, self.sums)

    def _order(self) -> list[int]:
        """The files in the order of their reading, without those that have no document: a chain may have no other."""
        files = self.text.files
        order = sorted(range(len(files)), key=lambda i: _hash(self.seed, files[i].name))
        empty = [i for i in order if is_empty(self.text, files[i])]
        if not empty or len(empty) == len(order):
            return order
        more = f" and {len(empty) - 3} more" if empty[3:] else ""
        names = ", ".join(files[i].name for i in sorted(empty)[:3])
        self.warnings.append(f"no readable document in {names}{more} of {self.text.name}: left out")
        return [i for i in order if i not in set(empty)]

    def measure(
        self, share: int, shares: int, gather: Callable[[list[int]], list[list[int]]], beat: Callable[[], None]
    ) -> None:
        """Counts the tokens of every document, of which this rank tokenizes every `shares`-th from `share` on.

        gather: returns the lists of all ranks; every rank calls this. beat: called again and again meanwhile. Raises
        `Mistakes` where nothing can be learned from any.
        """
        chain = Chain(self.text, self.order, 1, (), LanePlace(), self.bad, 1, self.sums, self.tokenizer)
        own: list[int] = []
        for number, (_, document) in enumerate(chain.in_order(LanePlace())):
            beat()
            if number % shares == share:
                own += [*document.key, len(chain.tokens_of(document, counts=True).ids)]
        self.measured, lists = [chain], gather(own)
        self.lengths = {
            (one[i], one[i + 1], one[i + 2]): one[i + 3] for one in lists for i in range(0, len(one), 4)
        }  # fmt: skip
        if not any(self.lengths.values()):
            raise chain.nothing_to_learn()

    def feeds(self, at: Mapping[int, tuple[LanePlace, int]], epoch: int | None = None) -> dict[int, Feed]:
        """The feed of each row of this rank, from its saved position on, by row. epoch: the only one that is read."""
        first = LanePlace(epoch or 0)
        epochs = self.epochs if epoch is None else min(epoch + 1, self.epochs or epoch + 1)
        per_chain = self.lanes // self.chain_count
        of_chain: dict[int, list[int]] = {}
        for row in self.part:
            of_chain.setdefault(row // per_chain, []).append(row)
        feeds: dict[int, Feed] = {}
        self.chains = []
        for number, members in of_chain.items():
            files = self.order[number :: self.chain_count]
            local = [row % per_chain for row in members]
            start = min((at[row][0] if row in at else first for row in members), default=first)
            chain = Chain(self.text, files, per_chain, local, start, self.bad, epochs, self.sums, self.tokenizer,
                          self.window, self.seed, self.lengths)  # fmt: skip
            self.chains.append(chain)
            feeds |= {row: Feed(row % per_chain, chain, at.get(row)) for row in members}
        return feeds

    def documents(self) -> Iterator[Labelled]:
        """All documents of the source once, in order."""
        for index in self.order:
            for row in rows(self.text, self.text.files[index]):
                if row.text is not None and self.text.keeps(row.text):
                    for piece in self.tokenizer.pieces(row.text):
                        try:
                            yield self.tokenizer.labelled(piece)
                        except NotLearned:
                            continue

    def check_enough(self, rows: int, length: int) -> None:
        """Raises `TooLittle` if all its text, and not just a short chain, is less than the only source of a step should
        be: `rows` sequences of `length` tokens. `Mistakes` where nothing of it can be learned."""
        needed, tokens = rows * length, 0
        for labelled in self.documents():
            tokens += len(labelled.ids)
            if tokens >= needed:
                return
        if not tokens:  # every document is left out, which has reasons of its own
            self.measure(0, 1, lambda own: [own], lambda: None)
        raise TooLittle(
            self.text.mistake(
                f"{self.text.name} is smaller than one batch: {tokens} tokens, where a step takes {needed}",
                why=f"batch.global_sequences {rows} x model.seq_len {length}",
                fix="more text, a smaller batch.global_sequences, a shorter model.seq_len, or data.epochs",
            ).diagnostics
        )

    # ---- what a saved position says of the files ----------------------------------------------------------
    def summed(self) -> dict[str, list[Any]]:
        """The sums of the files as far as they were read, as JSON."""
        return {self.prefix + name: one for name, one in self.sums.state().items()}

    def accept(self) -> None:
        """Accepts all files as they are."""
        self.sums.forget()
        self._sum_whole()

    def compare(self, state: Mapping[str, Any]) -> None:
        """Compares the files with the sums of a saved position from now on, and names those that were written since,
        of which the run before had not read and summed everything."""
        then, sums = state.get("times", {}), state.get("sums", {})
        for name in sorted(then.keys() & self.times.keys()):
            size = int(self.files[name].partition(":")[0])
            if then[name] != self.times[name] and sums.get(name, [0])[0] < size and not self.text.trusted:
                logger.warning("%s was written since the saved run read it: what that had not read may differ", name)
        self.sums.load(self._own(sums))

    def changed(self, state: Mapping[str, Any]) -> set[str]:
        """The files whose size, start, end, or whole content if they were read already, differ from the state's."""
        then = state.get("files", {})
        both = [name for name in then.keys() & self.files.keys() if then[name] and self.files[name]]
        changed = {name for name in both if then[name] != self.files[name]}
        return changed | {self.prefix + name for name in self.sums.differing(self._own(state.get("sums", {})))}

    def _own(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        return {n.removeprefix(self.prefix): one for n, one in sums.items() if n.startswith(self.prefix)}


class EpochRows:
    """Deals the rows of a single lane, through which all documents of an epoch go, to the steps in turn.

    Row i of an epoch is row i mod N of its step i div N, where a step has N rows. Behind the last row of an epoch its
    last step is filled with rows of padding, which have no targets; the next epoch begins with the next step.

    Args:
        readers: of the sources, each with one lane.
        weights, by: in which order the sources come, as in `Lane`.
        epochs: how often everything is read.
        state: a saved position; None: the beginning.
    """

    def __init__(
        self, readers: Sequence[SourceReader], weights: Sequence[float], by: Literal["rows", "tokens"], seed: int,
        epochs: int, state: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        self.readers, self.weights, self.by, self.seed, self.epochs = readers, weights, by, seed, epochs
        self.epoch: int = state["epoch"] if state else 0
        self._lane = self._open(state)

    def _open(self, state: Mapping[str, Any] | None = None) -> Lane:
        """The lane of the present epoch, from a position on."""
        places = state["feeds"] if state else [None] * len(self.readers)
        at = [{0: (LanePlace(*place[:-1]), int(place[-1]))} if place is not None else {} for place in places]
        feeds = [reader.feeds(place, self.epoch)[0] for reader, place in zip(self.readers, at)]
        return Lane(0, feeds, self.weights, self.by, self.seed, state)

    def state(self) -> dict[str, Any]:
        """The position, as JSON: the epoch, and the lane's place in it."""
        return {"epoch": self.epoch, **self._lane.full_state()}

    def step(self, part: Collection[int], count: int, seq_len: int, end: int) -> list[PackedRow]:
        """All `count` rows of the next step; only those of `part` are tokenized where lengths are known. None of them
        has a document where the last epoch is over."""
        while True:
            rows = [self._lane.row(seq_len, end, number in part) for number in range(count)]
            if rows[0].origin or self.epoch + 1 >= self.epochs:
                return rows
            self.epoch += 1
            self._lane = self._open()


def _chain_count(lanes: int, files: int) -> int:
    """The largest number of chains that divides lanes evenly, and files evenly or nearly (within one in eight)."""
    return max(
        n for n in range(1, min(CHAINS, lanes, files) + 1) if lanes % n == 0 and (files % n == 0 or files // n >= 8)
    )


def _hash(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()
