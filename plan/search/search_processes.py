"""Processes that price variants of a search at the same time."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from tpshard.programs.step.variants import Variants

T = TypeVar("T")


class Helpers:
    """Helper processes of a search, which start with their first work. Leaving the context ends them."""

    def __init__(self, count: int):
        self.count = max(0, count)
        self._pool: ProcessPoolExecutor | None = None
        self._others: set[BaseProcess] = set()

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is None:
            return
        # no result is awaited any more, and a process that exits by itself frees every graph node first, which is slow
        for process in set(multiprocessing.active_children()) - self._others:
            process.terminate()
        self._pool.shutdown(cancel_futures=True)

    def start(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Starts `function(*args)` in a process; both must be picklable."""
        with _safe_path():
            if self._pool is None:  # a forked process would inherit torch's threads without running them
                self._others = set(multiprocessing.active_children())
                spawn = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(self.count, spawn, initializer=_begin)
            return self._pool.submit(function, *args)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Processes that start in this context do not import the working directory's files in place of Python's own, such
    as a json.py, before they have the path of this process. They are started with their work."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def share(items: Sequence[T], among: int) -> list[Sequence[T]]:
    """Divides items into at most `among` parts, one item to each part in turn, since neighbours take about as long."""
    return [items[i::among] for i in range(min(among, len(items)))] or [[]]


def _begin() -> None:
    """Leaves Ctrl-C to the search's own process, and garbage collection to `Variants`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    gc.freeze()


@cache
def variants_of_helper() -> Variants:
    """The programs that this helper process of a search keeps from its earlier parts."""
    return Variants()
