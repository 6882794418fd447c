"""The engine in a thread of its own: it receives requests from the event loop, returns events, and replaces a lost
runner."""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from tpshard.programs.scheduling.request import Event, LoadedAdapter, Sequence
from tpshard.serve.api.metrics import Metrics
from tpshard.serve.engine.engine import Engine
from tpshard.serve.engine.step import Runner, WorkerLost

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between looks at the ranks of a server that has nothing to do."""

State = Literal["starting", "ready", "broken", "closed"]
Deliver = Callable[[list[Event]], None]
Post = Callable[[Callable[[], None]], object]
"""A function that calls another one in the thread of a client, such as an event loop's `call_soon_threadsafe`."""


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


class NameTaken(ValueError):
    """There is an adapter of that name."""


class NotLoaded(Exception):
    """An adapter of the start that cannot be loaded."""


class Unavailable(Exception):
    """The engine cannot accept requests: it is starting, recovering or ending."""


class Service:
    """Owns the runner and the engine; one thread does all work on them.

    adapters: the folders of the adapters that are loaded at the start, by the names that requests use.
    """

    def __init__(
        self, make_runner: Callable[[], Runner], limits: Limits, metrics: Metrics,
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.limits, self.metrics = limits, metrics
        self.adapters: Mapping[str, LoadedAdapter] = {}
        """The adapters that requests may name. Only the engine's thread changes it, by another map in its place."""
        self._folders = dict(adapters)
        """What to load into a new runner."""
        self._versions = itertools.count()
        self.state: State = "starting"
        self.draining = False
        self.cause: BaseException | None = None
        """Why the engine is broken or could not start."""
        self._make_runner = make_runner
        self._engine: Engine | None = None
        self._inbox: deque[tuple[str, Sequence]] = deque()
        """("add", or the reason to end a sequence early; the sequence)"""
        self._changes: deque[tuple[Future[None], Callable[[Engine], None]]] = deque()
        """Changes of adapters that clients wait for."""
        self._open: dict[int, tuple[Sequence, Deliver, Post]] = {}
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

    def submit(self, sequences: Iterable[Sequence], deliver: Deliver, post: Post | None = None) -> None:
        """Adds sequences; `deliver` is called with their events, by `post`, or in the engine's thread."""
        with self._wake:
            if not self.ready:
                raise Unavailable()
            for s in sequences:
                self._open[s.id] = (s, deliver, post or _at_once)
                self._inbox.append(("add", s))
            self._wake.notify()

    def cancel(self, sequences: Iterable[Sequence], reason: str = "abort") -> None:
        """Ends sequences without an event; ended ones are ignored. `reason` is for the metrics."""
        with self._wake:
            for s in sequences:
                self._open.pop(s.id, None)
                self._inbox.append((reason, s))
            self._wake.notify()

    def load(self, name: str, folder: str, replace: bool = False) -> Future[None]:
        """Loads an adapter between steps. The future has ValueError where it cannot be loaded, NameTaken where there is
        one of that name that is not to be replaced. Raises Unavailable, as
        the future does where the runner is lost meanwhile."""
        return self._change(lambda engine: self._load(engine, name, folder, replace))

    def unload(self, name: str) -> Future[None]:
        """Forgets an adapter between steps; requests that run with it end as usual. The future has KeyError where there
        is none of that name. Raises Unavailable, as `load` does."""
        return self._change(lambda _: self._unload(name))

    def _change(self, change: Callable[[Engine], None]) -> Future[None]:
        future: Future[None] = Future()
        with self._wake:
            if not self.ready:
                raise Unavailable()
            self._changes.append((future, change))
            self._wake.notify()
        return future

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
                engine = self._filled(runner)
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
                self._engine = engine
                self.metrics.observe(engine)
                self.state, self.cause, delay = "ready", None, 0.5
                self._started.set()
                self._serve(engine)
            finally:
                runner.close()
        self.state = "closed"
        self._fail_all("the server ends")

    def _serve(self, engine: Engine) -> None:
        """Runs steps until the server closes or the runner is lost."""
        while True:
            with self._wake:
                while not (self._inbox or self._changes or engine.busy or self._closing):
                    if not self._wake.wait(LOOK_S):
                        break
                if self._closing:
                    return
                inbox, self._inbox = self._inbox, deque()
                changes, self._changes = self._changes, deque()
            for request_kind, sequence in inbox:
                self._take(engine, request_kind, sequence)
            try:
                for future, change in changes:
                    _apply(future, change, engine)
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
            adapter = sequence.adapter
            try:
                if adapter is not None and self.adapters.get(adapter.name) is not adapter:
                    raise ValueError(f"the model `{adapter.name}` was unloaded, or loaded again")
                engine.add(sequence)
            except ValueError as error:
                self._hand_out([Event(sequence, None, finish="error", error=str(error))])

    def _filled(self, runner: Runner) -> Engine:
        """An engine with the adapters of the start, or those of the engine before."""
        engine, self.adapters = Engine(runner, max_running=self.limits.running), {}
        try:
            for name, folder in list(self._folders.items()):
                try:
                    self._load(engine, name, folder, replace=False)
                except ValueError as error:
                    if not self._started.is_set():
                        raise NotLoaded(str(error)) from error
                    log.error("the adapter `%s` is not served any more: %s", name, error)
                    del self._folders[name]
        except BaseException:
            runner.close()
            raise
        return engine

    def _load(self, engine: Engine, name: str, folder: str, replace: bool) -> None:
        old, others = self.adapters.get(name), {key: one for key, one in self.adapters.items() if key != name}
        if old is not None and not replace:
            raise NameTaken(f"there is an adapter `{name}` already; `load_inplace: true` replaces it")
        with self._wake:
            running = [s for s, *_ in self._open.values()] + engine.scheduler.running + [*engine.scheduler.waiting]
        taken = {one.slot for one in (*others.values(), *(s.adapter for s in running)) if one is not None}
        slot = next((slot for slot in range(engine.runner.slots) if slot not in taken), None)
        if slot is None:
            raise ValueError(f"all of the {engine.runner.slots} slots for adapters (serve.max_loras) are in use")
        engine.runner.adapt(slot, folder)
        root = hashlib.blake2b(f"{next(self._versions)} {name}".encode(), digest_size=16).digest()
        self.adapters, self._folders[name] = {**others, name: LoadedAdapter(name, folder, slot, root)}, folder

    def _unload(self, name: str) -> None:
        if name not in self.adapters:
            raise KeyError(name)
        self.adapters = {key: one for key, one in self.adapters.items() if key != name}
        del self._folders[name]

    def _hand_out(self, events: list[Event]) -> None:
        grouped: dict[Post, dict[Deliver, list[Event]]] = {}
        self.metrics.step(events, time.monotonic())
        for event in events:
            entry = self._open.get(event.sequence.id)
            if event.finish is not None:
                self._open.pop(event.sequence.id, None)
            if entry is not None:
                _, deliver, post = entry
                grouped.setdefault(post, {}).setdefault(deliver, []).append(event)
        for post, by_client in grouped.items():  # one for all clients of an event loop, which waking costs most
            _post(post, by_client)

    def _fail_all(self, why: str) -> None:
        with self._wake:
            self._inbox.clear()
            lost, self._open = self._open, {}
            changes, self._changes = self._changes, deque()
        for future, _ in changes:
            future.set_exception(Unavailable())
        for sequence, deliver, post in lost.values():
            sequence.finish = "error"
            event = Event(sequence, None, finish="error", error=why)
            self.metrics.step([event], time.monotonic())
            _post(post, {deliver: [event]})

    def _pause(self, seconds: float) -> None:
        with self._wake:
            if not self._closing:
                self._wake.wait(seconds)


def _post(post: Post, by_client: Mapping[Deliver, list[Event]]) -> None:
    def hand_out() -> None:
        for deliver, events in by_client.items():
            deliver(events)

    with suppress(RuntimeError):  # the event loop has ended
        post(hand_out)


def _at_once(work: Callable[[], None]) -> None:
    work()


def _apply(future: Future[None], change: Callable[[Engine], None], engine: Engine) -> None:
    """Makes a change that a client waits for. Raises what is no refusal of it."""
    try:
        change(engine)
        future.set_result(None)
    except (ValueError, KeyError) as error:
        future.set_exception(error)
    except BaseException:
        future.set_exception(Unavailable())
        raise
