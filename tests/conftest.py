"""Fixtures of all tests: one pool of gloo workers for every test that needs several processes."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in the Makefile: copies of processes with threads may hang

import pool_worker
import pytest
from forked import FORKS, copied_workers
from left_out import pytest_deselected, pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown
from patience import PATIENCE

__all__ = ["pytest_deselected", "pytest_sessionfinish", "pytest_terminal_summary", "pytest_testnodedown"]


LONG = ("train", "cli", "serve", "programs", "docs", "test_contributing.py", "test_triton_kernels.py",
        "test_launch.py", "test_serving_plan.py", "test_variants.py", "test_ops.py", "test_search.py")  # fmt: skip
"""Folders whose tests start processes, and other long files. They run first, so that at the end no worker of
pytest-xdist has one alone."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Lets the garbage collector run seldom, and skip all modules: graphs of many nodes would keep it busy."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in LONG and item.path.name not in LONG)


class WorkerError(AssertionError):
    """A function sent to the pool raised, hung or died; holds the traceback of the rank to blame."""


class Pool:
    """Gloo workers that live as long as the test session.

    `run(fn, *args, world=4)` calls `fn(context, *args)` on `world` ranks, in a process group of their own, and returns
    their results by rank. `fn` is a function at the top of a test module, arguments and results can be pickled.
    A worker that fails, hangs or dies is replaced, so the next test starts afresh.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._jobs = 0
        self._workers: dict[int, tuple[ForkServerProcess, Connection]] = {}

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world: int = 4,
        mesh: Mapping[str, int] | None = None,
        timeout: float = PATIENCE,
        device: str = "cpu",
    ) -> list[Any]:
        """`mesh` defaults to one axis `x` of `world` devices. WorkerError carries the failing rank's traceback."""
        self._jobs += 1
        job = {
            "module": fn.__module__, "path": inspect.getsourcefile(fn), "function": fn.__qualname__, "world": world,
            "mesh": dict(mesh or {"x": world}), "timeout": timeout, "device": device, "args": pickle.dumps(args),
            "store": str(self._folder / f"store-{self._jobs}"),
        }  # fmt: skip
        pipes = {self._worker(rank): rank for rank in range(world)}
        for pipe in pipes:
            pipe.send(job)
        results: dict[int, Any] = {}
        errors: list[tuple[bool, int, str]] = []
        deadline = time.monotonic() + timeout
        while pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pipes), left):
                assert isinstance(pipe, Connection)
                rank = pipes.pop(pipe)
                try:
                    state, content = pipe.recv()
                except (EOFError, ConnectionError):
                    state, content = "died", f"worker {rank} died\n{self._log(rank)}"
                if state == "done":
                    results[rank] = pickle.loads(content)
                else:
                    errors.append((state == "lost", rank, content))
                    self._drop(rank, kill=state == "died")
                    deadline = min(deadline, time.monotonic() + 30)
        for rank in pipes.values():
            if not errors:
                errors.append((False, rank, f"no answer within {timeout} s\n{self._log(rank)}"))
            self._drop(rank, kill=True)
        if errors:
            _, rank, text = min(errors, key=lambda error: error[0])
            raise WorkerError(f"rank {rank} of {world} failed in {fn.__name__}:\n{text}")
        return [results[rank] for rank in range(world)]

    def _worker(self, rank: int) -> Connection:
        if rank in self._workers and self._workers[rank][0].is_alive():
            return self._workers[rank][1]
        mine, theirs = Pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        process = FORKS.Process(target=pool_worker.main, args=(rank, theirs, environment, str(self._path(rank))))
        process.start()
        theirs.close()
        self._workers[rank] = (process, mine)
        return mine

    def _drop(self, rank: int, *, kill: bool) -> None:
        """Forgets a worker: the next run starts another in its place."""
        process, pipe = self._workers.pop(rank)
        if kill:
            process.kill()
        pipe.close()
        process.join(30)

    def _log(self, rank: int) -> str:
        return self._path(rank).read_text(errors="replace")[-3000:]

    def _path(self, rank: int) -> Path:
        return self._folder / f"worker-{rank}.log"

    def close(self) -> None:
        for rank in list(self._workers):
            self._drop(rank, kill=True)


@pytest.fixture(scope="session", autouse=True)
def cache() -> Iterator[Path]:
    """The cache folder of this process's tests, which holds the sample text and plans."""
    with tempfile.TemporaryDirectory(prefix="tpshard-cache-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPSHARD_CACHE", folder)
        yield Path(folder)


@pytest.fixture(autouse=True)
def no_plans_of_other_tests(cache: Path) -> Iterator[None]:
    """Gives each test its own cache of plans."""
    yield
    shutil.rmtree(cache / "plans", ignore_errors=True)


@pytest.fixture
def copies() -> Iterator[None]:
    """Workers that a command starts in this process are copies of it, which start at once."""
    with copied_workers():
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The one pool of workers of all multi-process tests; processes start when they are first needed."""
    with tempfile.TemporaryDirectory(prefix="tpshard-pool-") as folder:
        shared = Pool(Path(folder))
        yield shared
        shared.close()
