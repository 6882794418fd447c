"""Running a worker: reports any error to the launcher, or to the user if there is none, and exits."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from tpshard.diagnostics.exits import Exit
from tpshard.parallelism.runtime import messages
from tpshard.parallelism.runtime.place import WorkerPlace
from tpshard.parallelism.runtime.workers import follow

Describe = Callable[[BaseException], tuple[str, int]]
"""A function that returns the text of an error for the user, and its exit code."""


def run_worker(body: Callable[[], int], place: WorkerPlace, describe: Describe) -> NoReturn:
    """Runs a worker's work and ends the process with its exit code.

    The process ends at once: a regular exit waits for threads and process groups that other ranks no longer serve, and
    may abort over a thread inside a library's C++. tpshard's launcher prints the error of the rank at fault. Under
    another launcher this rank prints its own, after a pause if it only lost its peers, so that the cause is printed
    last. A crash of native code leaves the stacks of Python's threads.
    """
    follow()
    faulthandler.enable()
    try:
        _leave(body())
    except SystemExit as ending:
        _leave(ending.code if isinstance(ending.code, int) else 1 if ending.code else 0)
    except BaseException as error:
        if messages.is_lost_peer(error):
            first = str(error).strip().splitlines()[0]
            text = f"error: rank {place.rank} lost the connection to another worker\n  why: {first}"
            if not messages.send("secondary", text=text, exit=Exit.WORKER_LOST):
                _hold_back(text)
            _leave(Exit.WORKER_LOST)
        text, code = describe(error)
        if not messages.send("failed", text=text, exit=code):
            head = f"rank {place.rank} of {place.world} failed:\n" if place.world > 1 else ""
            print(head + text, file=sys.stderr, flush=True)
        _leave(code)


def _hold_back(text: str) -> None:
    """Prints a message after a pause, in which another launcher may end this rank: then the message is not needed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(5)
    print(text, file=sys.stderr, flush=True)


def _leave(code: int) -> NoReturn:
    """Flushes the output and ends the process at once."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
