"""The inference engine: takes requests and returns tokens, step by step. It has no threads, network or tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from tpshard.programs.scheduling.blocks import BlockPool
from tpshard.programs.scheduling.recurrent_scheduler import scheduler
from tpshard.programs.scheduling.request import Event, Logprob, Sequence
from tpshard.programs.scheduling.scheduler import Slice
from tpshard.serve.engine.picks import CHOOSE, NOTHING, Picked, Told, picks_of
from tpshard.serve.engine.step import Runner, StepInput


class Engine:
    """Generates tokens for many sequences at once on a Runner (continuous batching).

    >>> engine.add(Sequence(prompt=(1, 2, 3), sampling=Sampling(temperature=0), max_tokens=8))
    >>> while engine.busy:
    ...     for event in engine.step():
    ...         print(event.token)
    """

    def __init__(self, runner: Runner, *, blocks: int | None = None, max_running: int = 64) -> None:
        self.runner = runner
        self.pool = BlockPool(min(blocks or runner.blocks, runner.blocks), runner.block_size)
        most = min(max_running, runner.max_logit_rows)
        self.scheduler = scheduler(self.pool, runner.max_rows, runner.max_logit_rows, most, runner.chunks)
        self._told = Told(runner.max_logit_rows)
        self.steps = 0
        self.computed_tokens = 0

    @property
    def limit(self) -> int:
        """The maximal number of tokens of a sequence, prompt plus answer."""
        return min(self.runner.max_seq, self.pool.total * self.pool.block_size)

    @property
    def busy(self) -> bool:
        """Whether a sequence is running or waiting."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence. ValueError if it cannot fit the cache or the model, even alone."""
        # the last token's key and value are never needed, so a prompt of `limit` tokens can still be scored
        if not sequence.prompt or len(sequence.prompt) + sequence.max_tokens > self.limit:
            raise ValueError(
                f"a prompt of {len(sequence.prompt)} tokens and {sequence.max_tokens} new ones do not fit "
                f"{self.limit} tokens"
            )
        self.scheduler.add(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Removes a sequence and releases its blocks; does nothing if it has ended."""
        if not sequence.done:
            sequence.finish = "abort"
            self.scheduler.remove(sequence)

    def abort_all(self) -> list[Sequence]:
        """Removes all sequences and cached blocks after a failed step; returns the sequences, marked `error`."""
        lost = [*self.scheduler.running, *self.scheduler.waiting]
        for sequence in lost:
            sequence.finish = "error"
        s = self.scheduler
        self._told = Told(self.runner.max_logit_rows)
        self.pool = BlockPool(self.pool.total, self.pool.block_size)
        self.scheduler = scheduler(self.pool, s.max_rows, s.max_logit_rows, s.max_running, self.runner.chunks)
        self.scheduler.preemptions, self.scheduler.prefix_hit_tokens = s.preemptions, s.prefix_hit_tokens
        return lost

    def step(self) -> list[Event]:
        """Computes one step and returns its events. Raises WorkerLost."""
        slices = self.scheduler.schedule()
        if not slices:
            return []
        picked = self.runner.step(self._input(slices), picks_of(_asked(slices), self._told))
        self.steps += 1
        self.computed_tokens += sum(piece.count for piece in slices)
        return list(self._receive(slices, picked))

    def _input(self, slices: list[Slice]) -> StepInput:
        size, count = self.pool.block_size, len(slices)
        tables = np.zeros((count, max(len(piece.sequence.blocks) for piece in slices)), dtype=np.int64)
        tokens: list[int] = []
        for row, piece in zip(tables, slices):
            s = piece.sequence
            row[: len(s.blocks)] = s.blocks
            tokens += s.tokens[piece.start : piece.start + piece.count]
        numbers = np.array([(piece.start, piece.count, piece.logit_rows) for piece in slices], dtype=np.int64)
        starts, counts, wanted = numbers.T
        ends, owners = counts.cumsum(), np.repeat(np.arange(count), counts)
        positions = np.arange(len(tokens)) + np.repeat(starts + counts - ends, counts)
        slots = tables[owners, positions // size] * size + positions % size
        logit_rows = np.arange(wanted.sum()) + np.repeat(ends - wanted.cumsum(), wanted)
        states = [] if self.runner.chunks is None else [piece.sequence.state for piece in slices]
        adapters = np.zeros(0, dtype=np.int64)
        if self.runner.slots:
            own = [-1 if p.sequence.adapter is None else p.sequence.adapter.slot for p in slices]
            adapters = np.repeat(np.array(own, dtype=np.int64), counts)
        return StepInput(
            np.array(tokens, dtype=np.int64), positions, slots, owners, tables, logit_rows,
            np.array(states, dtype=np.int64), adapters,
        )  # fmt: skip

    def _receive(self, slices: list[Slice], picked: Picked) -> Iterator[Event]:
        """Advances each sequence by what was picked for its rows, in the order of the slices; yields the events."""
        row = 0
        for piece in slices:
            s, logit_rows, top = piece.sequence, piece.logit_rows, piece.sequence.sampling.logprobs
            rows = range(row, row := row + logit_rows)
            if not all(map(picked.sound, rows)):  # only this sequence fails
                yield self._end(s, None, "error", error="the model computed values that are not finite")
                continue
            if piece.scores:
                count = min(logit_rows, len(s.prompt) - piece.start - 1)
                s.prompt_scores += (picked.logprob(r, top or 0) for r in rows[: max(0, count)])
            self.scheduler.advance(piece)
            if piece.ends and s.max_tokens > 0:
                token = picked.token(rows[-1])
                s.tokens.append(token)
                finish = "stop" if token in s.stop_tokens else "length" if s.generated >= s.max_tokens else None
                logprob = None if top is None else picked.logprob(rows[-1], top)
                yield self._end(s, token, finish, logprob) if finish else Event(s, token, logprob)
            elif piece.ends:
                yield self._end(s, None, "length")

    def _end(
        self, s: Sequence, token: int | None, finish: str, logprob: Logprob | None = None, error: str | None = None
    ) -> Event:
        s.finish = finish
        self.scheduler.remove(s)
        return Event(s, token, logprob, finish, error)


def _asked(slices: list[Slice]) -> Iterator[tuple[Sequence, int]]:
    """What each row with logits is for: scoring the prompt's next token, choosing the answer's, or nothing."""
    for piece in slices:
        s, choosing = piece.sequence, piece.ends and piece.sequence.max_tokens > 0
        if not piece.scores:
            yield from [(s, CHOOSE)] * piece.logit_rows
            continue
        for offset in range(piece.logit_rows):
            place = piece.start + piece.count - piece.logit_rows + offset + 1
            if choosing and offset == piece.logit_rows - 1:
                yield s, CHOOSE
            else:
                yield s, s.prompt[place] if place < len(s.prompt) else NOTHING
