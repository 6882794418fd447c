"""The watchdog: a thread that reports the operation and stacks of a worker without progress, and ends it."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tpshard.diagnostics.exits import Exit
from tpshard.parallelism.runtime import messages
from tpshard.parallelism.runtime.outstanding import Outstanding


@dataclass(frozen=True)
class Doing:
    """The current activity of a worker: an operation of the program, and its module."""

    what: str
    module: str = ""
    waiting: bool = False
    """Whether it is inside a collective, so that others may be at fault."""

    def __str__(self) -> str:
        return f"{self.what} of {self.module}" if self.module else self.what


class Watchdog:
    """A thread that ends the worker when `beat` was not called for `limit_s` seconds.

    The executor assigns `doing` (cheap: an object, no lock) before it waits for a collective; `describe` turns it into
    words only for a report. The first `limit_s` must cover compilation. Time is that of the monotonic clock.
    """

    def __init__(self, rank: int, limit_s: float, *, on_stall: Callable[[str], None] | None = None):
        self.rank = rank
        self.limit_s = limit_s
        self.doing: object = Doing("starting up")
        self.describe: Callable[[object], Doing] = as_doing
        self.outstanding: Outstanding | None = None
        """The waits of a device that computes beside its host; None for a CPU."""
        self.stacks_to: Path | None = None
        """The folder for `rank-N.stacks.txt`; without one the stacks go to stderr."""
        self.step = 0
        self.progress = 0
        """The beats and collectives so far; the others wait for the rank with the fewest."""
        self._deadline = time.monotonic() + limit_s
        self._on_stall = on_stall or self._end
        self._stop = threading.Event()
        self._launcher = os.getppid() if messages.REPORT_FD in os.environ else None
        self._thread = threading.Thread(target=self._watch, name="tpshard-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2)

    def beat(self, step: int | None = None) -> None:
        """Tells the watchdog of progress: the end of a step, or of a part of it."""
        self.progress += 1
        if step is not None:
            self.step = step
        self._deadline = time.monotonic() + self.limit_s

    @contextmanager
    def allow(self, seconds: float, what: str) -> Iterator[None]:
        """Gives a long operation (compilation, a checkpoint) its own limit."""
        before, self.doing = self.doing, Doing(what)
        limit, self.limit_s = self.limit_s, max(self.limit_s, seconds)
        self.beat()
        try:
            yield
        finally:
            self.doing, self.limit_s = before, limit
            self.beat()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.limit_s / 4)):
            if self._launcher is not None and os.getppid() != self._launcher:
                os._exit(Exit.WORKER_LOST)  # The launcher has ended; PR_SET_PDEATHSIG is not available everywhere.
            if time.monotonic() > self._deadline:
                self._on_stall(self.stall_text())
                return

    def doing_now(self) -> Doing:
        """What the worker is at: the first wait that its device has not come past, or else what its host does."""
        try:
            ahead = self.outstanding.first() if self.outstanding is not None else None
        except RuntimeError as error:  # of CUDA: without this thread nothing would end a host that waits for others
            reason = (str(error).splitlines() or [""])[0]
            return Doing(f"{self.describe(self.doing)}, while its device has failed: {reason}")
        return self.describe(self.doing if ahead is None else ahead)

    def stall_text(self) -> str:
        """The message of a stalled rank: for how long, in which operation, and all stacks."""
        doing = self.doing_now()
        return f"rank {self.rank} made no progress for {self.limit_s:g} s in step {self.step}, in {doing}"

    def stacks(self) -> str:
        """The Python stacks of all threads."""
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            return file.read().decode(errors="replace")

    def _end(self, text: str) -> None:
        stacks = self.stacks()
        where = ""
        if self.stacks_to is not None:
            try:
                path = self.stacks_to / f"rank-{self.rank}.stacks.txt"
                path.write_text(f"{text}\n{stacks}")
                where = f"\n  stacks: {path}"
            except OSError:
                pass  # A full disk must not keep the watchdog from ending the worker.
        if not where:
            where = "\n" + stacks
        message, waits = f"error: {text}{where}", self.doing_now().waiting
        progress = self.progress if self.outstanding is None else self.outstanding.over
        if not messages.send("stalled", text=message, exit=Exit.WORKER_LOST, progress=progress, waiting=waits):
            sys.stderr.write(message + "\n")
            sys.stderr.flush()
            os._exit(Exit.WORKER_LOST)
        # The launcher compares all ranks, reports the one at fault and ends all. This rank waits at most 30 s for it.
        time.sleep(30)
        os._exit(Exit.WORKER_LOST)


def as_doing(value: object) -> Doing:
    """The activity itself, or an unknown object as an activity."""
    return value if isinstance(value, Doing) else Doing(str(value))
