"""Simulating a server without a model: the real scheduler and blocks, with the time of each step looked up."""

from __future__ import annotations

from collections import deque

from tpshard.parallelism.fusion import CacheReads
from tpshard.programs.serving import BLOCK_SIZE
from tpshard.programs.traffic import Answered, Rehearsal, Room, StepTime, Traffic
from tpshard.serve.blocks import BlockPool
from tpshard.serve.request import Sampling, Sequence
from tpshard.serve.scheduler import Scheduler, Slice


def rehearse(room: Room, traffic: Traffic, step_s: StepTime) -> Rehearsal:
    """Simulates all of the traffic. A request that arrives during a step is seen after it, as in a server.

    ValueError if a single request does not fit the cache.
    """
    if traffic.prompt + traffic.answer > room.blocks * BLOCK_SIZE:
        raise ValueError(f"{traffic.prompt + traffic.answer} tokens do not fit a cache of {room.blocks * BLOCK_SIZE}")
    return _Stage(room, traffic, step_s).play()


class _Stage:
    def __init__(self, room: Room, traffic: Traffic, step_s: StepTime) -> None:
        self.room, self.traffic, self.step_s = room, traffic, step_s
        pool = BlockPool(room.blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(pool, room.rows, room.logit_rows, min(room.running, room.logit_rows))
        self.coming = deque(enumerate(traffic.arrivals()))
        self.open: set[int] = set()
        """Numbers of the requests in the server, which are their sequences' ids."""
        self.came: dict[int, float] = {}
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.now, self.steps, self.refused, self.running = 0.0, 0, 0, 0

    def play(self) -> Rehearsal:
        while self.coming or self.open:
            self._let_in()
            slices = self.scheduler.schedule()
            if not slices:
                self.now = max(self.now, self.coming[0][1])
                continue
            self.steps += 1
            self.running += len(slices)
            self.now += self.step_s(sum(piece.count for piece in slices), cache_reads(slices))
            self._receive(slices)
        answers = [Answered(self.came[i], self.first[i], self.last[i], self.traffic.answer) for i in sorted(self.last)]
        mean = self.running / max(1, self.steps)
        return Rehearsal(tuple(answers), self.refused, self.scheduler.preemptions, self.steps, self.now, mean)

    def _let_in(self) -> None:
        closed = self.traffic.rate is None
        most = self.traffic.clients if closed else self.room.running + self.room.queue
        while self.coming and self.coming[0][1] <= self.now and not (closed and len(self.open) >= most):
            number, at = self.coming.popleft()
            if len(self.open) >= most:
                self.refused += 1
                continue
            prompt = (number, *([0] * (self.traffic.prompt - 1)))
            sequence = Sequence(prompt, Sampling(), self.traffic.answer, id=number, arrived=at)
            self.open.add(number)
            self.came[number] = self.now if closed else at
            self.scheduler.add(sequence)

    def _receive(self, slices: list[Slice]) -> None:
        for piece in slices:
            s, number = piece.sequence, piece.sequence.id
            ends = piece.ends
            self.scheduler.advance(piece)
            if not ends:
                continue
            s.tokens.append(0)
            self.first.setdefault(number, self.now)
            if len(s.answer) >= s.max_tokens:
                self.last[number] = self.now
                self.scheduler.remove(s)
                self.open.remove(number)


def cache_reads(slices: list[Slice]) -> CacheReads:
    """What a step reads of the cache: all blocks of its sequences, and the mean number of blocks before a row."""
    blocks = rows = 0
    attended = 0.0
    for piece in slices:
        end = piece.start + piece.count
        blocks += -(-end // BLOCK_SIZE)
        attended += piece.count * ((piece.start + end + 1) / 2 / BLOCK_SIZE + 0.5)  # the last block counts whole
        rows += piece.count
    return CacheReads(blocks, attended / rows)
