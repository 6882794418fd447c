"""A worker's outermost frame: whatever ends it is told to the launcher, or to the user when there is none."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from tpshard.parallelism.runtime import messages
from tpshard.parallelism.runtime.place import WorkerPlace
from tpshard.parallelism.runtime.workers import follow
from tpshard.recipes.exits import Exit

Describe = Callable[[BaseException], tuple[str, int]]
"""An error as the user should read it, and its exit code."""


def run_worker(body: Callable[[], int], place: WorkerPlace, describe: Describe) -> NoReturn:
    """Runs a worker's work and ends the process with its exit code.

    At once, whatever the code: the usual way out waits for threads and process groups that other ranks no longer serve,
    and may abort over a thread that it cuts off inside a library's C++. Our own launcher prints the error of the rank
    to blame; under another launcher this rank prints its own, and waits a moment when it only lost its peers, so that
    the cause is read last. A crash of native code leaves the stacks of Python's threads.
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
    """Another launcher ends this rank soon, without hearing from it; only if it lives on does it say what it knows."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(5)
    print(text, file=sys.stderr, flush=True)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
