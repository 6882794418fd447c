"""Choosing the rows of the next step of a model with recurrent layers (see `programs.recurrent_steps`).

A step is a chunk of one prompt, or one token of each of several sequences; the two kinds alternate while there is work
of both. A sequence's state is of all its tokens, so that no prefix of another one is reused.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence as Items

from tpshard.programs.scheduling.blocks import BlockPool
from tpshard.programs.scheduling.request import Sequence
from tpshard.programs.scheduling.scheduler import Scheduler, Slice


def scheduler(
    pool: BlockPool, max_rows: int, max_logit_rows: int, max_running: int, chunks: Items[int] | None
) -> Scheduler:
    """The scheduler of a model: with recurrent layers, one for these sizes of chunks, ascending; None without."""
    if chunks is None:
        return Scheduler(pool, max_rows, max_logit_rows, max_running)
    return RecurrentScheduler(pool, max_rows, max_logit_rows, max_running, chunks)


class RecurrentScheduler(Scheduler):
    """Chooses the slices of steps for a model with recurrent layers, and gives sequences their states."""

    def __init__(
        self, pool: BlockPool, max_rows: int, max_logit_rows: int, max_running: int, chunks: Items[int]
    ) -> None:
        super().__init__(pool, max_rows, max_logit_rows, min(max_running, max_rows))
        self.chunks = tuple(chunks)
        self._states = deque(range(1, self.max_running + 1))
        self._chunk_is_next = True

    def schedule(self) -> list[Slice]:
        """The slices of the next step; empty if there is nothing to do."""
        while self.waiting and len(self.running) < self.max_running and self._start(self.waiting[0]):
            pass
        for chunk in (self._chunk_is_next, not self._chunk_is_next):
            if slices := self._slices(chunk):
                self._chunk_is_next = not chunk
                return slices
        return []

    def advance(self, piece: Slice) -> None:
        """Marks a slice as computed."""
        piece.sequence.computed = piece.start + piece.count

    def _start(self, s: Sequence) -> bool:
        """Makes a waiting sequence run, if there are blocks for its first slice."""
        blocks = self.pool.take(-(-self._slice(s, self.max_rows, self.max_logit_rows).count // self.pool.block_size))
        if blocks is None:
            return False
        s.blocks, s.state = array("q", blocks), self._states.popleft()
        self.waiting.remove(s)
        self.running.append(s)
        return True

    def _slices(self, chunk: bool) -> list[Slice]:
        """The next chunk of the oldest prompt that has one, or one token of each sequence that has no chunk left."""
        slices: list[Slice] = []
        for s in list(self.running):
            piece = self._slice(s, self.max_rows, self.max_logit_rows)
            if s in self.running and (piece.count > 1) == chunk and self._room(s, piece, slices):
                slices.append(piece)
                if chunk:
                    break
        return slices

    def _slice(self, s: Sequence, rows: int, logit_rows: int) -> Slice:
        most = min(s.left, rows, logit_rows if s.needs_scores else s.left)
        return Slice(s, s.computed, max((size for size in self.chunks if size <= most), default=1))

    def _give_back(self, s: Sequence) -> None:
        super()._give_back(s)
        if s.state:
            self._states.append(s.state)
        s.state = 0
