"""Simulating a server without a model: the real scheduler and blocks, with the time of each step looked up."""

from __future__ import annotations

from collections import deque

from tpshard.parallelism.pricing.cost import ServingOverhead
from tpshard.parallelism.pricing.fusion import CacheReads
from tpshard.plan.server.traffic import Answered, Rehearsal, Room, StepTime, Traffic
from tpshard.programs.scheduling.blocks import BlockPool
from tpshard.programs.scheduling.recurrent_scheduler import scheduler
from tpshard.programs.scheduling.request import Sampling, Sequence
from tpshard.programs.scheduling.scheduler import Slice
from tpshard.programs.server.serving import BLOCK_SIZE

NONE = ServingOverhead()


def rehearse(room: Room, traffic: Traffic, step_s: StepTime, overhead: ServingOverhead = NONE) -> Rehearsal:
    """Simulates all of the traffic. A request that arrives during a step is seen after it, as in a server.

    step_s: the seconds of a step's program. overhead: the time of the server's host besides the programs.

    ValueError if a single request does not fit the cache.
    """
    if traffic.prompt + traffic.answer > room.blocks * BLOCK_SIZE:
        raise ValueError(f"{traffic.prompt + traffic.answer} tokens do not fit a cache of {room.blocks * BLOCK_SIZE}")
    return _SimulatedServer(room, traffic, step_s, overhead).run()


class _SimulatedServer:
    """The scheduler and blocks of a server under simulated traffic, its clock, and the times of its requests."""

    def __init__(self, room: Room, traffic: Traffic, step_s: StepTime, overhead: ServingOverhead) -> None:
        self.room, self.traffic, self.step_s, self.overhead = room, traffic, step_s, overhead
        pool = BlockPool(room.blocks, BLOCK_SIZE)
        self.scheduler = scheduler(pool, room.rows, room.logit_rows, min(room.running, room.logit_rows), room.chunks)
        arrivals = traffic.arrivals()
        if traffic.rate is None:  # in a closed loop, of each client's first request
            arrivals = arrivals[: traffic.clients]
        self.arrivals = deque(at + overhead.request_s for at in arrivals)
        """Seconds at which the next requests reach the scheduler; in a closed loop only those known so far."""
        self.arrived = 0
        self.open: set[int] = set()
        """Numbers of the requests in the server, which are their sequences' ids."""
        self.came: dict[int, float] = {}
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.now, self.steps, self.refused, self.running = 0.0, 0, 0, 0

    def run(self) -> Rehearsal:
        while self.arrivals or self.open:
            self._let_in()
            slices = self.scheduler.schedule()
            if not slices:
                self.now = max(self.now, self.arrivals[0])
                continue
            self.steps += 1
            self.running += len(slices)
            tokens = sum(piece.ends for piece in slices)
            self.now += self.overhead.step_s + self.overhead.token_s * tokens
            rows, chunk = sum(piece.count for piece in slices), self.room.chunks is not None and slices[0].count > 1
            self.now += self.step_s(rows, cache_reads(slices), chunk)
            self._receive(slices)
        answers = [Answered(self.came[i], self.first[i], self.last[i], self.traffic.answer) for i in sorted(self.last)]
        mean = self.running / max(1, self.steps)
        return Rehearsal(tuple(answers), self.refused, self.scheduler.preemptions, self.steps, self.now, mean)

    def _let_in(self) -> None:
        most = self.room.running + self.room.queue
        while self.arrivals and self.arrivals[0] <= self.now:
            at, number = self.arrivals.popleft(), self.arrived
            self.arrived += 1
            if self.traffic.rate is not None and len(self.open) >= most:
                self.refused += 1
                continue
            prompt = (number, *([0] * (self.traffic.prompt - 1)))
            sequence = Sequence(prompt, Sampling(), self.traffic.answer, id=number, arrived=at)
            self.open.add(number)
            self.came[number] = at - self.overhead.request_s
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
            if s.generated >= s.max_tokens:
                self.last[number] = self.now
                self.scheduler.remove(s)
                self.open.remove(number)
                if self.traffic.rate is None and self.arrived + len(self.arrivals) < self.traffic.count:
                    self.arrivals.append(self.now + self.overhead.request_s)


def cache_reads(slices: list[Slice]) -> CacheReads:
    """The cache blocks that a step reads: the total of its sequences, and the mean number that a row attends to."""
    blocks = rows = 0
    attended = 0.0
    for piece in slices:
        end = piece.start + piece.count
        blocks += -(-end // BLOCK_SIZE)
        attended += piece.count * ((piece.start + end + 1) / 2 / BLOCK_SIZE + 0.5)  # the last block counts whole
        rows += piece.count
    return CacheReads(blocks, attended / rows)
