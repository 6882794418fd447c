"""Choosing the rows of the next step: running sequences first, then chunks of prompts, oldest first.

When the cache is full, the youngest running sequence releases its blocks and is recomputed later, from the part of its
prefix that is still cached.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field

from tpshard.programs.scheduling.blocks import ROOT, BlockPool, chain
from tpshard.programs.scheduling.request import Sequence


@dataclass(slots=True)
class Slice:
    """Tokens start .. start + count of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    count: int
    ends: bool = field(init=False)
    """Whether the next token can be chosen after this slice."""
    scores: bool = field(init=False)
    """Whether these rows' logits score the prompt."""
    logit_rows: int = field(init=False)
    """The number of rows whose logits are needed."""

    def __post_init__(self) -> None:
        s = self.sequence
        self.ends = self.start + self.count == len(s.tokens)
        self.scores = s.needs_scores
        self.logit_rows = self.count if self.scores else int(self.ends and s.max_tokens > 0)


class Scheduler:
    """Chooses the slices of each step from running and waiting sequences, which share one pool of cache blocks."""

    def __init__(self, pool: BlockPool, max_rows: int, max_logit_rows: int, max_running: int) -> None:
        self.pool, self.max_rows, self.max_logit_rows, self.max_running = pool, max_rows, max_logit_rows, max_running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_hit_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self.waiting.append(sequence)

    def schedule(self) -> list[Slice]:
        """The slices of the next step; empty if there is nothing to do."""
        slices: list[Slice] = []
        rows, logit_rows = self.max_rows, min(self.max_logit_rows, self.max_rows)
        preemptions = self.preemptions
        for sequence in sorted(self.running, key=lambda s: s.left > 1):  # answers before prompts
            if not rows or not logit_rows:
                break
            if self.preemptions > preemptions and sequence not in self.running:
                continue
            piece = self._slice(sequence, rows, logit_rows)
            if not self._room(sequence, piece, slices):
                continue
            slices.append(piece)
            rows, logit_rows = rows - piece.count, logit_rows - piece.logit_rows
        return slices + self._admit(rows, logit_rows)

    def advance(self, piece: Slice) -> None:
        """Marks a slice as computed, and publishes the blocks that it filled."""
        s, size = piece.sequence, self.pool.block_size
        s.computed = piece.start + piece.count
        while (s.published + 1) * size <= s.computed:
            self.pool.publish(s.blocks[s.published], self._digest(s, s.published))
            s.published += 1

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, running or waiting, and releases its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._give_back(sequence)

    def _slice(self, s: Sequence, rows: int, logit_rows: int) -> Slice:
        count = min(s.left, rows)
        if s.needs_scores:
            count = min(count, logit_rows)
        return Slice(s, s.computed, count)

    def _room(self, s: Sequence, piece: Slice, slices: list[Slice]) -> bool:
        """Reserves a slice's blocks, preempting younger sequences if needed; False if the slice's own was preempted."""
        missing_blocks = -(-(piece.start + piece.count) // self.pool.block_size) - len(s.blocks)
        while missing_blocks > 0:
            new_blocks = self.pool.take(missing_blocks)
            if new_blocks is not None:
                s.blocks.extend(new_blocks)
                return True
            scheduled = {p.sequence.id for p in slices}
            victim = next((v for v in reversed(self.running) if v.id not in scheduled), s)
            self._preempt(victim)
            if victim is s:
                return False
        return True

    def _preempt(self, s: Sequence) -> None:
        self.running.remove(s)
        self._give_back(s)
        self.waiting.appendleft(s)
        self.preemptions += 1

    def _give_back(self, s: Sequence) -> None:
        self.pool.release(s.blocks)
        s.blocks, s.computed, s.published = array("q"), 0, 0
        if s.needs_scores:
            s.prompt_scores.clear()

    def _admit(self, rows: int, logit_rows: int) -> list[Slice]:
        slices: list[Slice] = []
        if not self.waiting:
            return slices
        pending = {self._digest(s, i) for s in self.running for i in range(s.published, len(s.tokens) // self._size)}
        for s in list(self.waiting):
            if not rows or not logit_rows or len(self.running) >= self.max_running:
                break
            reusable = 0 if s.needs_scores else (len(s.tokens) - 1) // self._size
            digests = [self._digest(s, i) for i in range(reusable)]
            cached = self.pool.cached_prefix(digests)
            if cached < reusable and digests[cached] in pending:
                continue  # a running sequence computes this block: wait for it instead of computing it twice
            reused = self.pool.reuse(digests[:cached])
            s.blocks, s.computed, s.published = array("q", reused), cached * self._size, cached
            piece = self._slice(s, rows, logit_rows)
            new_blocks = self.pool.take(-(-(piece.start + piece.count) // self._size) - len(s.blocks))
            if new_blocks is None:
                self._give_back(s)
                break
            s.blocks.extend(new_blocks)
            self.prefix_hit_tokens += s.computed
            s.cached = s.computed if s.cached is None else s.cached
            self.waiting.remove(s)
            self.running.append(s)
            slices.append(piece)
            pending.update(self._digest(s, i) for i in range(s.published, len(s.tokens) // self._size))
            rows, logit_rows = rows - piece.count, logit_rows - piece.logit_rows
        return slices

    @property
    def _size(self) -> int:
        return self.pool.block_size

    def _digest(self, s: Sequence, block: int) -> bytes:
        while len(s.digests) <= block:
            start = len(s.digests) * self._size
            root = ROOT if s.adapter is None else s.adapter.root
            s.digests.append(chain(s.digests[-1] if s.digests else root, s.tokens[start : start + self._size]))
        return s.digests[block]
