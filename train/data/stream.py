"""The global token stream: which sequences make up each step, the same on any mesh and after any resume.

Row i of every step is *lane* i; there are as many lanes as global sequences. Lanes are grouped into *chains*. A chain
reads its own files one after the other, epoch after epoch, and distributes the documents to its lanes in turn: document
i of epoch e goes to lane (i + e) mod lanes, so that no lane always gets the long ones. A lane packs its documents into
rows of seq_len tokens. A data rank therefore opens only the files of its chains and tokenizes only its lanes'
documents. The position of a lane is five small numbers, from which any rank can continue.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tpshard.train.data.corpus import BadRows, TextSource, check, is_empty, pieces, rows, sum_whole
from tpshard.train.data.lanes import Chain, Lane, LanePlace, PackedRow
from tpshard.train.data.shard_sums import ShardSums, merge_sums
from tpshard.train.data.step_batch import StepBatch
from tpshard.train.data.tokens import TextTokenizer

logger = logging.getLogger(__name__)

CHAINS = 64
"""The maximal number of files open at once over all ranks; a rank opens those of its own rows."""


class Loader:
    """The batches of one data rank in order, with one read ahead in the background.

    Every tensor of a batch is [rows, seq_len] int64. `targets` is the next token of the same document, else IGNORE.
    `documents` numbers a row's documents from 0; tokens attend only within theirs. `positions` counts from 0 within
    each document's part of the row. `origin` lists for each row the lines of files in it.

    Args:
        text: the text to read.
        global_sequences: rows of a step over all ranks.
        part: the rows of each step that this rank reads; contiguous ranges open the fewest files. Default: all.
        seed: decides the order of the files.
        bad_rows: the share of unreadable rows that stops the run.
        once: do not start over; rows after the end of the text are padding without targets (for held-out text).

    Raises:
        Mistakes: exit 6, here or from `next`: unreadable files, too many bad rows, less text than one step takes.
    """

    def __init__(
        self,
        text: TextSource,
        tokenizer: TextTokenizer,
        *,
        seq_len: int,
        global_sequences: int,
        part: Sequence[int] | None = None,
        seed: int = 0,
        bad_rows: float = 0.01,
        once: bool = False,
    ):
        self.text, self.tokenizer, self.seq_len, self.global_sequences = text, tokenizer, seq_len, global_sequences
        self.part = tuple(range(global_sequences) if part is None else part)
        assert all(0 <= row < global_sequences for row in self.part), (self.part, global_sequences)
        self.seed, self.once = seed, once
        self.bad = BadRows(text, bad_rows)
        self.sums = ShardSums()
        self.warnings: list[str] = []
        """What the user should know before the first step."""
        self.epoch = 0
        self._ahead: queue.Queue[tuple[StepBatch, dict[str, Any]] | BaseException] | None = None
        self._failure: BaseException | None = None
        if not once:
            check(text, bad_rows, self.sums)
        self.order = self._order()
        self.chains = _chain_count(global_sequences, len(self.order))
        self._files = {file.name: file.fingerprint() for file in text.files}
        self._times = {file.name: file.place.stat().st_mtime_ns for file in text.files if isinstance(file.place, Path)}
        self._sum_whole()
        self._start({})
        self._state = self._snapshot(0)

    def _sum_whole(self) -> None:
        """Sums the files of this rank's rows, unless they are large."""
        numbers = {row * self.chains // self.global_sequences for row in self.part}
        own = [self.text.files[i] for number in sorted(numbers) for i in self.order[number :: self.chains]]
        if not self.once:
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
            logger.info("%s starts over: epoch %d from step %d on", self.text.name, self.epoch, self.step)
        self._read_ahead()
        return batch

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
            self.sums.forget()
            self._sum_whole()
            self._start({})
            self._state = self._snapshot(int(state.get("step", 0)))
            return
        if force:
            self.sums.forget()
            self._sum_whole()
        else:
            self._warn_of_unsummed(state)
            self.sums.load(state.get("sums", {}))
        lanes = {int(row): at for row, at in state["lanes"].items()}
        self._start({row: (LanePlace(*at[:-1]), int(at[-1])) for row, at in lanes.items() if at is not None})
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

    def _start(self, at: Mapping[int, tuple[LanePlace, int]]) -> None:
        per_chain = self.global_sequences // self.chains
        of_chain: dict[int, list[int]] = {}
        for row in self.part:
            of_chain.setdefault(row // per_chain, []).append(row)
        lanes: dict[int, Lane] = {}
        for number, members in of_chain.items():
            files = self.order[number :: self.chains]
            local = [row % per_chain for row in members]
            start = min((at[row][0] if row in at else LanePlace() for row in members), default=LanePlace())
            chain = Chain(self.text, files, per_chain, local, start, self.bad, self.once, self.sums)
            for row in members:
                lanes[row] = Lane(row % per_chain, chain, self.tokenizer, at.get(row))
        self._lanes = [lanes[row] for row in self.part]

    def _batch(self, step: int) -> StepBatch:
        rows = [lane.row(self.seq_len) for lane in self._lanes]
        epoch = max((lane.place.epoch for lane in self._lanes if lane.place), default=0)
        if step == 0 and epoch > 0:
            self._check_enough()
        return _stack(rows, self.seq_len, epoch)

    def first_rows(self, most: int | None) -> StepBatch:
        """The first `most` rows of the text, read once: a row of every lane in turn, until enough or none is left.
        A text without documents gives one row of padding."""
        rows: list[PackedRow] = []
        lanes = self._lanes
        while lanes and (most is None or len(rows) < most):
            turn = [(lane, lane.row(self.seq_len)) for lane in lanes]
            lanes = [lane for lane, row in turn if row.origin]
            rows += [row for _, row in turn if row.origin]
        return _stack(rows[:most] or [self._lanes[0].row(self.seq_len)], self.seq_len, 0)

    def _check_enough(self) -> None:
        """Raises if all the text, and not just a short chain, started over within the first step."""
        needed, tokens = self.global_sequences * self.seq_len, 0
        for index in self.order:
            for row in rows(self.text, self.text.files[index]):
                if row.text is not None and self.text.keeps(row.text):
                    tokens += sum(len(self.tokenizer.document(piece)) for piece in pieces(row.text))
                if tokens >= needed:
                    return
        raise self.text.mistake(
            f"{self.text.name} is smaller than one batch: {tokens} tokens, where a step takes {needed}",
            why=f"batch.global_sequences {self.global_sequences} x model.seq_len {self.seq_len}",
            fix="more text, a smaller batch.global_sequences, or a shorter model.seq_len",
        )

    def _snapshot(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "global_sequences": self.global_sequences,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "tokenizer": self.tokenizer.fingerprint,
            "column": self.text.column,
            "files": self._files,
            "times": self._times,
            "sums": self.sums.state(),
            "lanes": {
                str(row): None if lane.place is None else [*lane.place, lane.offset]
                for row, lane in zip(self.part, self._lanes)
            },
        }

    def _differences(self, state: Mapping[str, Any]) -> list[str]:
        differences: list[str] = []
        for key, name in (
            ("global_sequences", "batch.global_sequences"),
            ("seq_len", "model.seq_len"),
            ("seed", "seed"),
        ):
            if state.get(key) != getattr(self, key):
                differences.append(f"{name} was {state.get(key)}, is {getattr(self, key)}")
        if state.get("tokenizer") != self.tokenizer.fingerprint:
            other = self.tokenizer.others.get(str(state.get("tokenizer")))
            differs = "differs" if other is None else f"was used as with {other}"
            differences.append(f"the tokenizer {self.tokenizer.folder} {differs}")
        if (column := state.get("column", "text")) != self.text.column:
            differences.append(f"data.column was {column}, is {self.text.column}")
        then: Mapping[str, str] = state.get("files", {})
        for change, names in (
            ("is gone", sorted(then.keys() - self._files.keys())),
            ("is new", sorted(self._files.keys() - then.keys())),
            ("has changed", self._changed(state)),
        ):
            if names:
                differences.append(f"{names[0]} {change}" + (f", and {len(names) - 1} more" if names[1:] else ""))
        missing = [row for row in self.part if str(row) not in state.get("lanes", {})]
        if missing and not differences:
            differences.append(f"the saved position lacks row {missing[0]}")
        return differences

    def _changed(self, state: Mapping[str, Any]) -> list[str]:
        """The files whose size, start, end, or whole content if they were read already, differ from the state's."""
        then = state.get("files", {})
        both = [name for name in then.keys() & self._files.keys() if then[name] and self._files[name]]
        changed = {name for name in both if then[name] != self._files[name]}
        return sorted(changed | set(self.sums.differing(state.get("sums", {}))))

    def _warn_of_unsummed(self, state: Mapping[str, Any]) -> None:
        """Names files that were written since, of which the run before had not read and summed everything."""
        then, sums = state.get("times", {}), state.get("sums", {})
        for name in sorted(then.keys() & self._times.keys()):
            size = int(self._files[name].partition(":")[0])
            if then[name] != self._times[name] and sums.get(name, [0])[0] < size and not self.text.trusted:
                logger.warning("%s was written since the saved run read it: what that had not read may differ", name)


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of all rows, from the states of every rank at the same step."""
    steps = {(s["step"], s["global_sequences"], s["tokenizer"]) for s in states}
    assert len(steps) == 1, "the ranks' positions in the text belong to different steps"
    lanes = {row: at for state in states for row, at in state["lanes"].items()}
    sums = {name: list(one) for name, one in merge_sums([state.get("sums", {}) for state in states]).items()}
    return {**states[0], "sums": sums, "lanes": dict(sorted(lanes.items(), key=lambda item: int(item[0])))}


def held_out_batch(
    text: TextSource, tokenizer: TextTokenizer, *, seq_len: int, sequences: int, bad_rows: float = 0.01
) -> StepBatch:
    """The first sequences of held-out text, always the same ones: as many as there are, up to `sequences`; 0: all."""
    loader = Loader(
        text, tokenizer, seq_len=seq_len, global_sequences=sequences or CHAINS, bad_rows=bad_rows, once=True
    )
    return loader.first_rows(sequences or None)


def _stack(rows: Sequence[PackedRow], seq_len: int, epoch: int) -> StepBatch:
    def column(field: str) -> torch.Tensor:
        values = [getattr(row, field) for row in rows]
        return torch.tensor(values, dtype=torch.int64).reshape(len(rows), seq_len)

    tensors = {field: column(field) for field in ("tokens", "targets", "documents", "positions")}
    return StepBatch(tensors, tuple(" ".join(row.origin) for row in rows), epoch)


def _chain_count(lanes: int, files: int) -> int:
    """The largest number of chains that divides lanes evenly, and files evenly or nearly (within one in eight)."""
    return max(
        n for n in range(1, min(CHAINS, lanes, files) + 1) if lanes % n == 0 and (files % n == 0 or files // n >= 8)
    )


def _hash(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()
