"""The engine in a thread of its own: it receives requests from the event loop, returns events, and replaces a lost
runner."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from tpshard.programs.scheduling.request import Event, Sequence
from tpshard.serve.api.metrics import Metrics
from tpshard.serve.engine.engine import Engine
from tpshard.serve.engine.step import Runner, WorkerLost

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between looks at the ranks of a server that has nothing to do."""

State = Literal["starting", "ready", "broken", "closed"]
Deliver = Callable[[list[Event]], None]


@dataclass(frozen=True)
class Limits:
    """The limits of a server: sequences and seconds."""

    running: int = 64
    """Sequences computed at once."""
    queue: int = 256
    """Sequences that may wait."""
    request_s: float = 600.0
    """Maximal duration of a request, waiting included."""
    header_s: int = 30
    """Maximal time for a request's header to arrive, and for a connection to be idle after an answer."""
    body_bytes: int = 1 << 20
    body_s: float = 30.0
    """Maximal time for a request's body to arrive."""
    grace_s: float = 30.0
    """Maximal time for running requests to finish after the server is asked to end."""

    @property
    def most(self) -> int:
        """Sequences that may be in the server at once."""
        return self.running + self.queue


class Full(Exception):
    """The queue is full."""


class Unavailable(Exception):
    """The engine cannot accept requests: it is starting, recovering or ending."""


class Service:
    """Owns the runner and the engine; one thread does all work on them."""

    def __init__(self, make_runner: Callable[[], Runner], limits: Limits, metrics: Metrics) -> None:
        self.limits, self.metrics = limits, metrics
        self.state: State = "starting"
        self.draining = False
        self.cause: BaseException | None = None
        """Why the engine is broken or could not start."""
        self._make_runner = make_runner
        self._engine: Engine | None = None
        self._inbox: deque[tuple[str, Sequence]] = deque()
        """("add", or the reason to end a sequence early; the sequence)"""
        self._open: dict[int, tuple[Sequence, Deliver]] = {}
        """Sequences with a waiting client, by id."""
        self._wake = threading.Condition()
        self._started = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- from other threads --------------------------------------------------------------------------------
    def start(self, wait: bool = True) -> None:
        """Loads the runner. With `wait`, returns when it is ready, and raises its error."""
        self._thread.start()
        if wait:
            self._started.wait()
            if self.state != "ready" and self.cause is not None:
                raise self.cause

    @property
    def limit(self) -> int:
        """The maximal number of tokens of a sequence. Raises Unavailable before the first runner is ready."""
        return self._ready_engine().limit

    @property
    def vocab(self) -> int:
        """Number of logits per row. Raises Unavailable while no engine is loaded."""
        return self._ready_engine().runner.vocab

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted."""
        return self.state == "ready" and not self.draining

    @property
    def healthy(self) -> bool:
        """Whether the engine is loaded and its thread runs."""
        return self.state == "ready" and self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """Whether no request is open or waiting."""
        return not self._open and not self._inbox

    def check(self, sequences: int) -> None:
        """Raises Full or Unavailable if this many more sequences do not fit now, ValueError if they never can."""
        if not self.ready:
            raise Unavailable()
        if sequences > self.limits.most:
            raise ValueError(f"{sequences} answers at once are more than this server's limit of {self.limits.most}")
        if len(self._open) + sequences > self.limits.most:
            raise Full()

    def submit(self, sequences: Iterable[Sequence], deliver: Deliver) -> None:
        """Adds sequences; `deliver` is called with their events in the engine's thread."""
        with self._wake:
            if not self.ready:
                raise Unavailable()
            for s in sequences:
                self._open[s.id] = (s, deliver)
                self._inbox.append(("add", s))
            self._wake.notify()

    def cancel(self, sequences: Iterable[Sequence], reason: str = "abort") -> None:
        """Ends sequences without an event; ended ones are ignored. `reason` is for the metrics."""
        with self._wake:
            for s in sequences:
                self._open.pop(s.id, None)
                self._inbox.append((reason, s))
            self._wake.notify()

    def close(self) -> None:
        """Ends the thread and the runner; running sequences get an error event."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout=30)

    # ---- in the engine's thread ----------------------------------------------------------------------------
    def _ready_engine(self) -> Engine:
        if self._engine is None:
            raise Unavailable()
        return self._engine

    def _run(self) -> None:
        delay = 0.5
        while not self._closing:
            try:
                runner = self._make_runner()
            except BaseException as error:
                self.cause = error
                if not self._started.is_set():
                    self.state = "broken"
                    self._started.set()
                    return
                log.error("the model could not be restarted: %s", error)
                self._pause(delay)
                delay = min(delay * 2, 30.0)
                continue
            try:
                self._engine = Engine(runner, max_running=self.limits.running)
                self.metrics.observe(self._engine)
                self.state, self.cause, delay = "ready", None, 0.5
                self._started.set()
                self._serve(self._engine)
            finally:
                runner.close()
        self.state = "closed"
        self._fail_all("the server ends")

    def _serve(self, engine: Engine) -> None:
        """Runs steps until the server closes or the runner is lost."""
        while True:
            with self._wake:
                while not (self._inbox or engine.busy or self._closing):
                    if not self._wake.wait(LOOK_S):
                        break
                if self._closing:
                    return
                inbox, self._inbox = self._inbox, deque()
            for request_kind, sequence in inbox:
                self._take(engine, request_kind, sequence)
            try:
                if not engine.busy:
                    engine.runner.check()
                events = engine.step()
            except WorkerLost as error:
                log.error("%s", error)
                self.state, self.cause = "broken", error
                engine.abort_all()
                self._fail_all("a worker was lost; the model is being restarted")
                return
            except Exception:
                log.exception("a step failed")
                engine.abort_all()
                self._fail_all("the model failed on this batch")
                continue
            self._hand_out(events)

    def _take(self, engine: Engine, what: str, sequence: Sequence) -> None:
        if what != "add":
            if not sequence.done:
                self.metrics.count_finished(sequence.id, sequence.arrived, what)
            engine.abort(sequence)
        elif not sequence.done:
            try:
                engine.add(sequence)
            except ValueError as error:
                self._hand_out([Event(sequence, None, finish="error", error=str(error))])

    def _hand_out(self, events: list[Event]) -> None:
        now = time.monotonic()
        grouped: dict[Deliver, list[Event]] = {}
        for event in events:
            self.metrics.event(event, now)
            entry = self._open.get(event.sequence.id)
            if event.finish is not None:
                self._open.pop(event.sequence.id, None)
            if entry is not None:
                grouped.setdefault(entry[1], []).append(event)
        for deliver, own_events in grouped.items():
            deliver(own_events)

    def _fail_all(self, why: str) -> None:
        with self._wake:
            self._inbox.clear()
            lost, self._open = self._open, {}
        for sequence, deliver in lost.values():
            sequence.finish = "error"
            event = Event(sequence, None, finish="error", error=why)
            self.metrics.event(event, time.monotonic())
            deliver([event])

    def _pause(self, seconds: float) -> None:
        with self._wake:
            if not self._closing:
                self._wake.wait(seconds)
