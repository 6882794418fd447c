"""The metrics of a server for Prometheus, and for wandb if the recipe asks for it."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from tpshard.programs.scheduling.request import Event

if TYPE_CHECKING:
    from tpshard.serve.engine.engine import Engine

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Durations:
    """A histogram of seconds. One thread adds to it, without a lock, since it does so for each token."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = f"tpshard_{name}_seconds", text
        self._counts = [0] * (len(_SECONDS) + 1)
        self._total = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(_SECONDS, seconds)] += times
        self._total += seconds * times

    def collect(self) -> Metric:
        bounds = [*(str(float(bound)) for bound in _SECONDS), "+Inf"]
        return HistogramMetricFamily(self.name, self.text, list(zip(bounds, accumulate(self._counts))), self._total)


class Metrics:
    """Counters that survive a restart of the engine, and gauges of the current engine."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine: Engine | None = None
        self._preemptions = self._prefix_hits = 0
        self._last: dict[int, float] = {}
        self.registry.register(self)

        self.first_token = Durations("time_to_first_token", "From a request's arrival to its first token.")
        self.between_tokens = Durations("time_between_tokens", "Between two tokens of one answer.")
        self.whole = Durations("request", "From a request's arrival to its end.")
        self.tokens = Counter("tpshard_generated_tokens", "Tokens sent to clients.", registry=self.registry)
        self.prompt_tokens = Counter("tpshard_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self.finished = Counter("tpshard_requests_finished", "Ended sequences.", ["reason"], registry=self.registry)
        self.refused = Counter("tpshard_requests_refused", "Refused requests.", ["status"], registry=self.registry)

    def observe(self, engine: Engine) -> None:
        """Makes the metrics read `engine` from now on; counts of earlier engines are kept."""
        if self._engine is not None:
            self._preemptions += self._engine.scheduler.preemptions
            self._prefix_hits += self._engine.scheduler.prefix_hit_tokens
        self._engine = engine

    def step(self, events: Iterable[Event], now: float) -> None:
        """Counts a step's tokens, and the requests that they finish; `now` is in seconds of the monotonic clock."""
        before = Tally[float]()
        for s, token, _, finish, _ in events:
            if token is not None:
                last = self._last.get(s.id)
                before[now if last is None else last] += 1
                if last is None:
                    self.first_token.add(now - s.arrived)
                self._last[s.id] = now
            if finish is not None:
                self.count_finished(s.id, s.arrived, finish)
        self.tokens.inc(before.total())
        del before[now]
        for last, times in before.items():  # most tokens of a step follow ones of the step before
            self.between_tokens.add(now - last, times)

    def count_finished(self, number: int, arrived: float, reason: str) -> None:
        """Counts a finished request and its duration; `arrived` is in seconds of the monotonic clock."""
        self._last.pop(number, None)
        self.whole.add(time.monotonic() - arrived)
        self.finished.labels(reason).inc()

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        blocks = GaugeMetricFamily("tpshard_kv_blocks", "Blocks of the paged cache.", labels=["state"])
        requests = GaugeMetricFamily("tpshard_requests", "Sequences in the engine.", labels=["state"])
        total = free = cached = running = waiting = 0
        preemptions, hits = self._preemptions, self._prefix_hits
        if self._engine is not None:
            pool, scheduler = self._engine.pool, self._engine.scheduler
            total, free, cached = pool.total, pool.free, pool.cached
            running, waiting = len(scheduler.running), len(scheduler.waiting)
            preemptions, hits = preemptions + scheduler.preemptions, hits + scheduler.prefix_hit_tokens
        for state, value in (("total", total), ("free", free), ("cached", cached)):
            blocks.add_metric([state], value)
        for state, value in (("running", running), ("waiting", waiting)):
            requests.add_metric([state], value)
        yield blocks
        yield requests
        yield CounterMetricFamily(
            "tpshard_preemptions", "Sequences recomputed because the cache was full.", preemptions
        )
        yield CounterMetricFamily("tpshard_prefix_hit_tokens", "Prompt tokens found in the cache.", hits)
        yield from (one.collect() for one in (self.first_token, self.between_tokens, self.whole))

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def snapshot(self) -> dict[str, float]:
        """The metrics as plain numbers, without the histograms' buckets."""
        numbers: dict[str, float] = {}
        for metric in self.registry.collect():
            for sample in metric.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    label = ".".join(sample.labels.values())
                    numbers[f"serve/{sample.name.removeprefix('tpshard_')}{'.' + label if label else ''}"] = (
                        sample.value
                    )
        return numbers
