"""The global token stream: which sequences make up each step, the same on any mesh and after any resume.

Row i of every step is *lane* i; there are as many lanes as global sequences. Lanes are grouped into *chains*, for each
source apart. A chain reads its own files one after the other, epoch after epoch, and distributes the documents to its
lanes in turn: document i of epoch e goes to lane (i + e) mod lanes, so that no lane always gets the long ones. A lane
packs its documents into rows of seq_len tokens. A data rank therefore opens only the files of its chains and tokenizes
only its lanes' documents. The position of a lane is a few small numbers, from which any rank can continue.

A run of whole epochs has a single lane, whose rows are dealt to the steps in turn (`EpochRows`), so that an epoch ends
with one short step. All ranks follow it by the lengths of documents, which they count together before the first step,
and tokenize only what is in their own rows.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tpshard.train.data.conversations import AnswerTokenizer
from tpshard.train.data.corpus import TextSource
from tpshard.train.data.lanes import Lane, LanePlace, PackedRow
from tpshard.train.data.open_data import Mixture, Share
from tpshard.train.data.shard_sums import merge_sums
from tpshard.train.data.source_reader import CHAINS, EpochRows, SourceReader
from tpshard.train.data.step_batch import StepBatch
from tpshard.train.data.tokens import TextTokenizer

logger = logging.getLogger(__name__)


class Loader:
    """The batches of one data rank in order, with one read ahead in the background.

    Every tensor of a batch is [rows, seq_len] int64. `targets` is the next token of the same document, else IGNORE.
    `documents` numbers a row's documents from 0; tokens attend only within theirs. `positions` counts from 0 within
    each document's part of the row. `origin` lists for each row the lines of files in it.

    Args:
        text: the sources to read.
        global_sequences: rows of a step over all ranks.
        part: the rows of each step that this rank reads; contiguous ranges open the fewest files. Default: all.
        seed: decides the order of the files, and of the documents in a window.
        bad_rows: the share of unreadable rows that stops the run.
        checks: whether small local data is read once before; not for held-out text.

    Raises:
        Mistakes: exit 6, here or from `next`: unreadable files, too many bad rows, less text than one step takes.
    """

    def __init__(
        self,
        text: Mixture,
        *,
        seq_len: int,
        global_sequences: int,
        part: Sequence[int] | None = None,
        seed: int = 0,
        bad_rows: float = 0.01,
        checks: bool = True,
    ):
        self.text, self.seq_len, self.global_sequences, self.seed = text, seq_len, global_sequences, seed
        self.part = tuple(range(global_sequences) if part is None else part)
        assert all(0 <= row < global_sequences for row in self.part), (self.part, global_sequences)
        self.tokenizer = text.tokenizer
        self.epoch = 0
        self._ahead: queue.Queue[tuple[StepBatch, dict[str, Any]] | BaseException] | None = None
        self._failure: BaseException | None = None
        lanes, own = (global_sequences, self.part) if text.epochs is None else (1, (0,))
        self.readers = [
            SourceReader(share.text, share.tokenizer, share.epochs, lanes, own, text.window, seed, bad_rows,
                         f"{_label(number, share)}: " if text.shares[1:] else "", checks)
            for number, share in enumerate(text.shares, 1)
        ]  # fmt: skip
        self._start({})
        self._state = self._snapshot(0)

    @property
    def warnings(self) -> list[str]:
        """What the user should know before the first step."""
        return [warning for reader in self.readers for warning in reader.warnings]

    @property
    def notes(self) -> Counter[str]:
        """What was done to documents of this rank's rows that were not taken as they are, in the first epoch."""
        return sum((reader.notes for reader in self.readers), Counter())

    @property
    def step(self) -> int:
        """The number of batches returned since the beginning of the run."""
        return int(self._state["step"])

    def next(self) -> StepBatch:
        """This rank's rows of the next step."""
        if self._failure:
            raise self._failure
        result = (self._ahead or self._read_ahead()).get()
        self._ahead = None
        if isinstance(result, BaseException):
            self._failure = result
            raise result
        batch, self._state = result
        if batch.epoch > self.epoch:
            self.epoch = batch.epoch
            logger.info("%s starts over: epoch %d from step %d on", self._repeated(), self.epoch, self.step)
        self._read_ahead()
        return batch

    def read_first(self) -> None:
        """Reads the batch that `next` returns first. Raises `Mistakes` (exit 6) for what is wrong with it."""
        ahead = self._read_ahead()
        result = ahead.get()
        ahead.put(result)
        if isinstance(result, BaseException):
            raise result

    def state_dict(self) -> dict[str, Any]:
        """The position after the last returned batch, as JSON, for this rank's rows. See `merge_states`."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any], *, force: bool = False) -> None:
        """Continues at the position `state` (of all rows: see `merge_states`), on any mesh.

        With `force` the text starts over where the state does not fit, instead of raising.

        Raises:
            Mistakes: exit 6; the files, the tokenizer or the size of a step differ from the state's.
        """
        self.close()
        self._failure = None
        differences = self._differences(state)
        if differences and not force:
            raise self.text.mistake(
                "the text cannot be resumed where the saved run stopped",
                why="; ".join(differences),
                fix="restore what has changed; resume=force starts the data over; run.dir=DIR starts another run",
            )
        if differences:
            logger.warning("the text starts over: %s", "; ".join(differences))
            for reader in self.readers:
                reader.accept()
            self._start({})
            self._state = self._snapshot(int(state.get("step", 0)))
            return
        for reader in self.readers:
            reader.accept() if force else reader.compare(state)
        self._start({int(row): at for row, at in state["lanes"].items() if at is not None})
        self._state = self._snapshot(int(state["step"]))

    def close(self) -> None:
        """Waits for the batch being read ahead and discards it."""
        if self._ahead is not None:
            self._ahead.get()
            self._ahead = None

    def _read_ahead(self) -> queue.Queue[tuple[StepBatch, dict[str, Any]] | BaseException]:
        result: queue.Queue[tuple[StepBatch, dict[str, Any]] | BaseException] = queue.Queue(1)

        def read(step: int) -> None:
            try:
                batch = self._batch(step)
                result.put((batch, self._snapshot(step + 1)))
            except BaseException as error:  # raised again in the thread that waits for the batch
                result.put(error)

        self._ahead = result
        # not a daemon: a thread that is killed inside a library's C++ at exit changes the process's exit code
        threading.Thread(target=read, args=(self.step,), name="read-ahead").start()
        return result

    def _start(self, states: Mapping[int, Any]) -> None:
        """Opens the lanes of this rank's rows at their saved positions, by row."""
        weights = [share.weight for share in self.text.shares]
        self._lanes, self._epochs = [], None
        if self.text.epochs is not None:
            self._epochs = EpochRows(self.readers, weights, self.text.by, self.seed, self.text.epochs, states.get(0))
            self.epoch = self._epochs.epoch
            return
        of_feeds: list[dict[int, tuple[LanePlace, int]]] = [{} for _ in self.readers]
        more: dict[int, Mapping[str, Any]] = {}
        for row, state in states.items():
            more[row] = state if isinstance(state, Mapping) else {}
            for at, place in zip(of_feeds, more[row].get("feeds", [state])):
                if place is not None:
                    at[row] = LanePlace(*place[:-1]), int(place[-1])
        feeds = [reader.feeds(at) for reader, at in zip(self.readers, of_feeds)]
        self._lanes = [
            Lane(row, [one[row] for one in feeds], weights, self.text.by, self.seed, more.get(row)) for row in self.part
        ]
        self.epoch = max((lane.epoch for lane in self._lanes), default=0)

    def _repeated(self) -> str:
        """The names of the sources that have come to the present epoch; others are not read as often, or not yet."""
        ways = range(len(self.readers))
        if self._epochs is not None:
            again = [i for i in ways if (self.readers[i].epochs or self.epoch + 1) > self.epoch]
        else:
            places = [(i, lane.feeds[i].place) for lane in self._lanes for i in ways]
            again = sorted({i for i, place in places if place is not None and place.epoch >= self.epoch})
        return ", ".join(self.text.shares[i].text.name for i in again)

    def _batch(self, step: int) -> StepBatch:
        if self._epochs is not None:
            rows = self._epochs.step(self.part, self.global_sequences, self.seq_len, self.tokenizer.end)
            return _stack([rows[number] for number in self.part], self.seq_len, self._epochs.epoch)
        rows = [lane.row(self.seq_len, self.tokenizer.end) for lane in self._lanes]
        epoch = max((lane.epoch for lane in self._lanes), default=0)
        if step == 0 and epoch > 0 and len(self.readers) == 1:
            self.readers[0].check_enough(self.global_sequences, self.seq_len)
        return _stack(rows, self.seq_len, epoch)

    def first_rows(self, most: int | None) -> StepBatch:
        """The first `most` rows of the text, read once: a row of every lane in turn, until enough or none is left.
        A text without documents gives one row of padding."""
        rows: list[PackedRow] = []
        lanes = self._lanes
        while lanes and (most is None or len(rows) < most):
            turn = [(lane, lane.row(self.seq_len, self.tokenizer.end)) for lane in lanes]
            lanes = [lane for lane, row in turn if row.origin]
            rows += [row for _, row in turn if row.origin]
        return _stack(rows[:most] or [self._lanes[0].row(self.seq_len, self.tokenizer.end)], self.seq_len, 0)

    def count_steps(
        self, share: int = 0, shares: int = 1, gather: Callable[[list[int]], list[list[int]]] = lambda own: [own],
        beat: Callable[[], None] = lambda: None,
    ) -> int:  # fmt: skip
        """The steps of a run of whole epochs; called before the first. The ranks tokenize everything once, each its
        share, and gather the lengths. beat: called again and again meanwhile. Raises `Mistakes` (exit 6)."""
        assert self._epochs is not None, "only epochs have an end that can be counted"
        for reader in self.readers:
            reader.measure(share, shares, gather, beat)
        self._start({})
        steps = 0
        while self._epochs.step((), self.global_sequences, self.seq_len, 0)[0].origin:
            steps += 1
            beat()
        self._start({})
        return steps

    def _snapshot(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "global_sequences": self.global_sequences,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "tokenizer": " ".join(dict.fromkeys(reader.tokenizer.fingerprint for reader in self.readers)),
            "column": "; ".join(reader.text.columns.name for reader in self.readers),
            "mixture": self._mixture | ({} if self._epochs is None else {"whole_epochs": True}),
            "files": {name: one for reader in self.readers for name, one in reader.files.items()},
            "times": {name: one for reader in self.readers for name, one in reader.times.items()},
            "sums": {name: one for reader in self.readers for name, one in reader.summed().items()},
            "lanes": {str(row): lane.state() for row, lane in zip(self.part, self._lanes)}
            if self._epochs is None
            else {"0": self._epochs.state()},
        }

    @property
    def _mixture(self) -> dict[str, Any]:
        """The sources with their weights, and how documents are shuffled, as JSON."""
        if len(self.text.shares) == 1 and self.text.window == 1:
            return {}
        shares = self.text.shares if self.text.shares[1:] else ()
        weights = {_label(number, share): share.weight for number, share in enumerate(shares, 1)}
        return {"weights": weights, "by": self.text.by, "window": self.text.window}

    def _differences(self, state: Mapping[str, Any]) -> list[str]:
        differences: list[str] = []
        for key, name in (
            ("global_sequences", "batch.global_sequences"),
            ("seq_len", "model.seq_len"),
            ("seed", "seed"),
        ):
            if state.get(key) != getattr(self, key):
                differences.append(f"{name} was {state.get(key)}, is {getattr(self, key)}")
        if state.get("tokenizer") != self._state["tokenizer"]:
            other = self.tokenizer.others.get(str(state.get("tokenizer")))
            differs = "differs" if other is None else f"was used as with {other}"
            differences.append(f"the tokenizer {self.tokenizer.folder} {differs}")
        if (column := state.get("column", "text")) != self._state["column"]:
            differences.append(f"the columns read were {column}, are {self._state['column']}")
        mixture = dict(state.get("mixture", {}))
        if (whole := mixture.pop("whole_epochs", False)) != (self._epochs is not None):
            was, now = ("by whole epochs", "without end") if whole else ("without end", "by whole epochs")
            differences.append(f"rows were dealt {was}, are dealt {now}, as `data.epochs` or `train.steps` asks")
        if mixture != self._mixture:
            differences.append(f"the mixture was {mixture or 'one source in order'}, is {self._mixture}")
        files: Mapping[str, str] = self._state["files"]
        then: Mapping[str, str] = state.get("files", {})
        for change, names in (
            ("is gone", sorted(then.keys() - files.keys())),
            ("is new", sorted(files.keys() - then.keys())),
            ("has changed", sorted(name for reader in self.readers for name in reader.changed(state))),
        ):
            if names:
                differences.append(f"{names[0]} {change}" + (f", and {len(names) - 1} more" if names[1:] else ""))
        lanes = self.part if self._epochs is None else (0,)
        missing = [row for row in lanes if str(row) not in state.get("lanes", {})]
        if missing and not differences:
            differences.append(f"the saved position lacks row {missing[0]}")
        return differences


def _label(number: int, share: Share) -> str:
    """The name of a source in saved positions, without its folder: a run's recipe names its sources from everywhere."""
    return f"{number}. {os.path.basename(share.text.name)}"


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of all rows, from the states of every rank at the same step."""
    steps = {(s["step"], s["global_sequences"], s["tokenizer"]) for s in states}
    assert len(steps) == 1, "the ranks' positions in the text belong to different steps"
    lanes = {row: at for state in states for row, at in state["lanes"].items()}
    sums = {name: list(one) for name, one in merge_sums([state.get("sums", {}) for state in states]).items()}
    return {**states[0], "sums": sums, "lanes": dict(sorted(lanes.items(), key=lambda item: int(item[0])))}


def held_out_batch(
    text: TextSource, tokenizer: TextTokenizer | AnswerTokenizer, *, seq_len: int, sequences: int,
    bad_rows: float = 0.01,
) -> StepBatch:  # fmt: skip
    """The first sequences of held-out text, always the same ones: as many as there are, up to `sequences`; 0: all."""
    loader = Loader(
        Mixture.of(text, tokenizer, 1), seq_len=seq_len, global_sequences=sequences or CHAINS, bad_rows=bad_rows,
        checks=False,
    )  # fmt: skip
    return loader.first_rows(sequences or None)


def _stack(rows: Sequence[PackedRow], seq_len: int, epoch: int) -> StepBatch:
    def column(field: str) -> torch.Tensor:
        values = [getattr(row, field) for row in rows]
        return torch.tensor(values, dtype=torch.int64).reshape(len(rows), seq_len)

    tensors = {field: column(field) for field in ("tokens", "targets", "documents", "positions")}
    return StepBatch(tensors, tuple(" ".join(row.origin) for row in rows), epoch)
