"""The traffic of a server, and the times of its answers, as plain values for plans and servers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from tpshard.parallelism.pricing.fusion import CacheReads


class StepTime(Protocol):
    """A function from a step's rows and what they read of the cache to its seconds."""

    def __call__(self, rows: int, cached: CacheReads, chunk: bool = False) -> float:
        """chunk: whether the rows are a chunk of one prompt for a model with recurrent layers."""
        ...


@dataclass(frozen=True)
class Traffic:
    """Requests of one size: `rate` per second at random times (Poisson), or without a rate from `clients` in a closed
    loop, each sending its next request after its last answer."""

    prompt: int
    """Prompt tokens of a request; no two requests share a prefix."""
    answer: int
    """Tokens of an answer."""
    rate: float | None = None
    clients: int = 1
    count: int = 1000
    """Number of requests."""
    seed: int = 0

    def arrivals(self) -> list[float]:
        """Arrival times in seconds; with `clients`, all at the start."""
        if self.rate is None:
            return [0.0] * self.count
        draw = random.Random(self.seed)
        return list(accumulate(draw.expovariate(1.0) / self.rate for _ in range(self.count)))


@dataclass(frozen=True)
class Room:
    """The capacity of a server."""

    blocks: int
    """Blocks of its cache."""
    rows: int
    """Rows of its largest step."""
    logit_rows: int
    """Maximal rows of a step whose next token is chosen."""
    running: int
    """Requests answered at once."""
    queue: int
    """Requests that may wait; more are refused."""
    chunks: tuple[int, ...] | None = None
    """With recurrent layers: how many tokens of one prompt a step may have."""


@dataclass(frozen=True)
class Answered:
    """The times in seconds of a request, and of the first and last token of its answer."""

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
        """Seconds per token after the first."""
        return (self.last - self.first) / max(1, self.tokens - 1)


@dataclass(frozen=True)
class Rehearsal:
    """The result of simulating or running a server under its traffic."""

    answers: tuple[Answered, ...]
    """Answers in the order of the requests' arrival."""
    refused: int
    """Requests refused because the queue was full."""
    preempted: int
    """Number of preemptions."""
    steps: int
    seconds: float
    """Seconds until the last answer."""
    mean_running: float
    """Mean number of requests per step."""

    @property
    def after_start(self) -> tuple[Answered, ...]:
        """The answers without the first fifth, which found an emptier server."""
        return self.answers[len(self.answers) // 5 :]

    def ttft(self, share: float) -> float:
        """The quantile `share` of the seconds to the first token."""
        return quantile([a.ttft for a in self.after_start], share)

    def tpot(self, share: float) -> float:
        """The quantile `share` of the seconds per further token."""
        return quantile([a.tpot for a in self.after_start], share)

    @property
    def requests_a_second(self) -> float:
        """Answers per second between the filling and the emptying of the server."""
        ends = sorted(a.last for a in self.answers)
        middle = ends[len(ends) // 5 : max(len(ends) * 4 // 5, len(ends) // 5 + 2)]
        return (len(middle) - 1) / (middle[-1] - middle[0]) if len(middle) > 1 and middle[-1] > middle[0] else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a `share` of the `values` lies; 0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
