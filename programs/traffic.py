"""What clients send to a server, and when each of them was answered: plain values of plans and of servers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tpshard.parallelism.fusion import Cached

StepTime = Callable[[int, Cached], float]
"""Seconds of a server's step by its rows and what they find in the cache."""


@dataclass(frozen=True)
class Traffic:
    """Requests of one size: `rate` of them a second at random times (Poisson), or, without a rate, `clients` that each
    send their next request when the last is answered."""

    prompt: int
    """Tokens of a request, which no other request begins with."""
    answer: int
    """Tokens of its answer."""
    rate: float | None = None
    clients: int = 1
    count: int = 1000
    """Requests in all."""
    seed: int = 0

    def arrivals(self) -> list[float]:
        """Seconds from the start at which requests come; with `clients` all are there from the start."""
        if self.rate is None:
            return [0.0] * self.count
        draw = random.Random(self.seed)
        return list(accumulate(draw.expovariate(1.0) / self.rate for _ in range(self.count)))


@dataclass(frozen=True)
class Room:
    """What a server has for requests."""

    blocks: int
    """Of its cache."""
    rows: int
    """Of its largest step."""
    wanted: int
    """Most rows of a step whose next token can be chosen."""
    running: int
    """Requests answered at once."""
    queue: int
    """Requests that may wait for that; more are refused."""


@dataclass(frozen=True)
class Answered:
    """When a request came, and when the first and the last token of its answer were there, in seconds."""

    came: float
    first: float
    last: float
    tokens: int

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.came

    @property
    def tpot(self) -> float:
        """Seconds of each token after the first."""
        return (self.last - self.first) / max(1, self.tokens - 1)


@dataclass(frozen=True)
class Rehearsal:
    """How a server answered its traffic."""

    answers: tuple[Answered, ...]
    """In the order in which the requests came."""
    refused: int
    """Requests that found the queue full."""
    preempted: int
    """Times that a request gave its place in the cache back."""
    steps: int
    seconds: float
    """Until the last answer."""
    mean_running: float
    """Requests in a step, in the mean."""

    @property
    def settled(self) -> tuple[Answered, ...]:
        """The answers without the first fifth, which found an emptier server."""
        return self.answers[len(self.answers) // 5 :]

    def ttft(self, share: float) -> float:
        """Seconds to the first token that a share of the requests does not exceed."""
        return quantile([a.ttft for a in self.settled], share)

    def tpot(self, share: float) -> float:
        """Seconds of each further token that a share of the requests does not exceed."""
        return quantile([a.tpot for a in self.settled], share)

    @property
    def requests_a_second(self) -> float:
        """Answered once the server had filled, and before it emptied."""
        ends = sorted(a.last for a in self.answers)
        some = ends[len(ends) // 5 : max(len(ends) * 4 // 5, len(ends) // 5 + 2)]
        return (len(some) - 1) / (some[-1] - some[0]) if len(some) > 1 and some[-1] > some[0] else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """The least of `values` that a share of them does not exceed; 0 where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
