"""Computes in a forked process what this one needs later, where a second core would be idle."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

import psutil

T = TypeVar("T")

_busy = [False]
"""Whether this process is such a fork or waits for one: two cores are enough for no more."""


@contextlib.contextmanager
def ahead(function: Callable[[], T], fork: bool = True) -> Iterator[Callable[[], T]]:
    """A context in which `function()` is computed beside what this process does; yields what waits for its result.

    The result is the same as in this process, where it is computed without `fork`, on one core, beside other threads,
    with little memory, or if the fork fails for any reason, so that an error is raised here. It must be picklable, and
    what the function changes is lost. A fork that nobody waits for ends with the context.
    """
    started = _start(function) if fork and not _busy[0] and _can_fork() else None
    if started is None:
        yield function
        return
    pid, pipe = started
    waiting = [pid]

    def result() -> T:
        with open(pipe, "rb", closefd=False) as stream:
            data = stream.read()
        ended = os.waitpid(waiting.pop(), 0)[1]
        _busy[0] = False
        return pickle.loads(data) if ended == 0 else function()  # type: ignore[no-any-return]

    _busy[0] = True
    try:
        yield result
    finally:
        _busy[0] = False
        os.close(pipe)
        for child in waiting:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _can_fork() -> bool:
    """Whether a fork is safe, since no other thread can hold a lock that it would wait for, and saves time."""
    if sys.platform != "linux" or threading.active_count() > 1 or len(os.sched_getaffinity(0)) < 2:
        return False
    memory = psutil.virtual_memory()
    return bool(memory.available > memory.total / 2)


def _start(function: Callable[[], object]) -> tuple[int, int] | None:
    """The process that computes `function()`, and the pipe from which its pickled result is read."""
    read, write = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(read)
        os.close(write)
        return None
    if pid == 0:
        os.close(read)
        _compute(function, write)
    os.close(write)
    return pid, read


def _compute(function: Callable[[], object], pipe: int) -> NoReturn:
    """Writes the pickled result and ends this process at once: whatever else it inherited is its parent's to end."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
        _busy[0] = True
        data = pickle.dumps(function())
        with open(pipe, "wb") as stream:
            stream.write(data)
        status = 0
    finally:
        os._exit(status)
