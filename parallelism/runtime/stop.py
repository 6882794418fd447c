"""Requests to stop, which arrive as signals and are handled between steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tpshard.diagnostics.exits import Exit

POLITE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that ask a run to save and end. The launcher starts its workers with these blocked, until `listen`."""


def hold() -> None:
    """Keeps requests to stop until `listen`, as in workers of tpshard's own launcher: all ranks then stop together."""
    signal.pthread_sigmask(signal.SIG_BLOCK, POLITE)


@contextmanager
def stoppable() -> Iterator[None]:
    """Where nothing of a run has begun, SIGTERM and SIGUSR1 end the process at once, with the code of a stop."""
    before = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"stopped before the run began; the same command begins it\n")
    os._exit(Exit.PREEMPTED)  # an exception raised in the middle of an import may be caught there


class StopRequest:
    """Records the signal that asks this process to stop; a second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Installs the handlers (main thread only), and unblocks signals that arrived during start-up."""
        for number in POLITE:
            self._before[number] = signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, POLITE)

    def close(self) -> None:
        """Restores the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            os._exit(Exit.INTERRUPTED)
        if self.signal is None or number == signal.SIGINT:
            self.signal = signal.Signals(number)

    @property
    def urgency(self) -> int:
        """How urgent the request is (0: none, 1: preempted, 2: interrupted); the largest of all ranks decides."""
        return 0 if self.signal is None else 2 if self.signal == signal.SIGINT else 1


def exit_code(urgency: int) -> int:
    """The exit code for the urgency on which all ranks have agreed."""
    return {0: Exit.DONE, 1: Exit.PREEMPTED, 2: Exit.INTERRUPTED}[urgency]
