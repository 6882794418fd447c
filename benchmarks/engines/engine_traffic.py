"""The traffic of a server that is not tpshard's, step by step; steps that only repeat are taken at once."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import numpy as np
from tpshard.plan.server.traffic import Answered, Rehearsal, Traffic

from engines.engine_steps import EngineSteps, StepLoad

_REPEATED = 64
"""Steps taken at once, over which the cache that they read hardly grows."""


@dataclass
class _Asked:
    """A request in the server."""

    came: float
    prompt: int
    answer: int
    computed: int = 0
    made: int = 0
    first: float = 0.0


@dataclass(frozen=True)
class EngineRun:
    """A simulated server."""

    rehearsal: Rehearsal
    gaps: np.ndarray
    """[steps, 2]: seconds of each step without prompts, and the number of its sequences."""
    limit: int
    """Requests of this traffic that the server holds at once: the most that it should admit."""


def serve_traffic(steps: EngineSteps, traffic: Traffic, varied: float = 0.0) -> EngineRun:
    """Simulates all of the traffic. varied: the share by which lengths differ from the mean at most. ValueError if the
    cache does not hold one request."""
    limit = min(steps.engine.running, steps.positions // (traffic.prompt + traffic.answer))
    if limit < 1:
        raise ValueError(f"{traffic.prompt + traffic.answer} tokens do not fit a cache of {steps.positions}")
    return _SimulatedEngine(steps, traffic, varied, limit).run()


class _SimulatedEngine:
    """The queue of a server, its clock, and the requests that it answers."""

    def __init__(self, steps: EngineSteps, traffic: Traffic, varied: float, limit: int) -> None:
        self.steps, self.traffic, self.limit = steps, traffic, limit
        draw = random.Random(traffic.seed)
        spread = (1 - varied, 1 + varied)
        self.sizes = [
            (
                max(1, round(traffic.prompt * draw.uniform(*spread))),
                max(1, round(traffic.answer * draw.uniform(*spread))),
            )
            for _ in range(traffic.count)
        ]
        arrivals = traffic.arrivals()
        first = arrivals if traffic.rate is not None else arrivals[: traffic.clients]
        self.arrivals = deque(first)
        self.arrived = 0
        self.waiting: deque[_Asked] = deque()
        self.prompts: deque[_Asked] = deque()
        self.answering: list[_Asked] = []
        self.held = 0
        self.answers: list[Answered] = []
        self.gaps: list[tuple[float, int]] = []
        self.now, self.count, self.running, self.preempted = 0.0, 0, 0, 0

    def run(self) -> EngineRun:
        while self.arrivals or self.waiting or self.prompts or self.answering:
            self._let_in()
            if self.prompts:
                self._compute_prompts()
            elif self.answering:
                self._repeat()
            else:
                self.now = max(self.now, self.arrivals[0])
        mean = self.running / max(1, self.count)
        self.answers.sort(key=lambda answer: answer.came)
        done = Rehearsal(tuple(self.answers), 0, self.preempted, self.count, self.now, mean)
        return EngineRun(done, np.array(self.gaps or [(0.0, 1)]), self.limit)

    def _let_in(self) -> None:
        while self.arrivals and self.arrivals[0] <= self.now:
            self.waiting.append(_Asked(self.arrivals.popleft(), *self.sizes[self.arrived]))
            self.arrived += 1
        engine = self.steps.engine
        while self.waiting and len(self.prompts) + len(self.answering) < engine.running:
            one = self.waiting[0]
            if self.held and self.held + one.prompt + (one.answer if engine.reserves else 0) > self.steps.positions:
                break
            self.held += one.prompt + (one.answer if engine.reserves else one.made)
            self.prompts.append(self.waiting.popleft())

    def _make_room(self, more: int) -> None:
        """Sends the youngest back until the cache holds so many more positions; their tokens are computed again."""
        while self.held + more > self.steps.positions and len(self.answering) > 1 and not self.steps.engine.reserves:
            one = self.answering.pop()
            self.held -= one.prompt + one.made
            one.computed = 0
            self.waiting.appendleft(one)
            self.preempted += 1

    def _compute_prompts(self) -> None:
        """One step with rows of prompts, oldest first."""
        engine = self.steps.engine
        if engine.mixes:
            self._make_room(len(self.answering))
        answering = self.answering if engine.mixes else []
        left = max(1, engine.step_tokens - len(answering))
        rows, attended, ended = 0, 0.0, list[_Asked]()
        while self.prompts and left:
            one = self.prompts[0]
            part = min(left, one.prompt + one.made - one.computed)
            attended += part * (one.computed + part / 2)
            one.computed += part
            rows, left = rows + part, left - part
            if one.computed < one.prompt + one.made:
                break
            ended.append(self.prompts.popleft())
        load = StepLoad(len(answering), _positions(answering), rows, attended / rows, len(ended))
        self.now += self.steps.seconds(load)
        self._count(1, len(answering) + len(ended))
        self._answer(answering, 1)
        for one in ended:
            one.first = one.first or self.now
            one.made += 1
            self.answering.append(one)
        self.held += 0 if engine.reserves else len(ended)
        self._finish()

    def _repeat(self) -> None:
        """Steps of next tokens alone, until one ends or a request may come."""
        self._make_room(len(self.answering))
        running, sequences = self.answering, len(self.answering)
        times = min(min(one.answer - one.made for one in running), _REPEATED)
        if not self.steps.engine.reserves:
            times = max(1, min(times, (self.steps.positions - self.held) // sequences))
        at = _positions(running)
        each = self.steps.seconds(StepLoad(sequences, at + times / 2))
        if self.arrivals and self.arrivals[0] < self.now + times * each:
            times = max(1, int((self.arrivals[0] - self.now) / each) + 1)
        self.now += times * each
        self.gaps.append((each, sequences * times))
        self._count(times, sequences)
        self._answer(running, times)
        self._finish()

    def _count(self, times: int, sequences: int) -> None:
        self.count += times
        self.running += times * sequences

    def _answer(self, running: list[_Asked], times: int) -> None:
        for one in running:
            one.made += times
        self.held += 0 if self.steps.engine.reserves else times * len(running)

    def _finish(self) -> None:
        done = [one for one in self.answering if one.made >= one.answer]
        if not done:
            return
        self.answering = [one for one in self.answering if one.made < one.answer]
        late = self.steps.engine.request_s
        for one in done:
            self.held -= one.prompt + (one.answer if self.steps.engine.reserves else one.made)
            self.answers.append(Answered(one.came, one.first + late, self.now + late, one.answer))
            if self.traffic.rate is None and self.arrived + len(self.arrivals) < self.traffic.count:
                self.arrivals.append(self.now + late)


def _positions(running: list[_Asked]) -> float:
    """Positions that these attend to, on average."""
    return sum(one.prompt + one.made for one in running) / max(1, len(running))
