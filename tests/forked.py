"""Processes that are copies of one that has imported torch and tpshard, which takes seconds: they start at once."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from patience import PATIENCE

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(
    ["pytest", "torch.distributed", "torch._dynamo.convert_frame", "torch.export", "tpshard.train.run.training_worker"]
)


def enter(environment: Mapping[str, str], out: str | Path, err: str | Path) -> None:
    """Gives a copy the environment and the streams of the process that asked for it."""
    gc.freeze()  # what was imported stays: the collector need not go through it
    gc.set_threshold(50_000, 20, 100)
    os.environ.clear()
    os.environ.update(environment)
    reads, writes = os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT
    for descriptor, (path, mode) in enumerate(((os.devnull, reads), (out, writes), (err, writes))):
        opened = os.open(path, mode)
        os.dup2(opened, descriptor)
        os.close(opened)


class Copied:
    """Code that runs as by `python -c CODE ARGUMENTS` in a folder: a `subprocess.Popen` that keeps the output in files.

    The code may not ask what is imported. Workers that it launches are copies too.
    """

    def __init__(
        self, code: str, *arguments: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [Path(self._folder.name, name) for name in ("out", "err")]
        variables = dict(os.environ if environment is None else environment)
        self._process = FORKS.Process(
            target=_run, args=(code, arguments, variables, folder or Path.cwd(), *self._streams)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int:
        assert self._process.exitcode is not None
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def printed(self) -> tuple[str, str]:
        """Its output and its errors until now."""
        out, err = (path.read_text() if path.exists() else "" for path in self._streams)
        return out, err

    def wait(self, timeout: float = PATIENCE) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            raise TimeoutError(self.printed()[1])
        return self._process.exitcode

    def communicate(self, timeout: float = PATIENCE) -> tuple[str, str]:
        """Its output and its errors, at its end."""
        self.wait(timeout)
        return self.printed()


def python(
    code: str, *arguments: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """As `python -c CODE ARGUMENTS` in a folder, to its end; see `Copied`."""
    process = Copied(code, *arguments, environment=environment, folder=folder)
    out, err = process.communicate()
    return subprocess.CompletedProcess(code, process.returncode, out, err)


class CopiedWorker:
    """What a launcher needs of `subprocess.Popen([python, ..., "-m", MODULE, *ARGUMENTS])`, by a copy of itself."""

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], stdin: int, stdout: Any, stderr: Any,
        pass_fds: Sequence[int], process_group: int,
    ) -> None:  # fmt: skip
        self.returncode: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._become(argv, env, stdout, pass_fds)
            finally:
                os._exit(1)

    @staticmethod
    def _become(argv: Sequence[str], env: Mapping[str, str], output: Any, descriptors: Sequence[int]) -> None:
        os.setpgid(0, 0)
        gc.freeze()  # the launcher's files must not close descriptors of the worker's
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if output is not None:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number not in (0, 1, 2, *descriptors):
                try:
                    os.close(number)
                except OSError:  # the listing's own
                    continue
        os.environ.clear()
        os.environ.update(env)
        module = argv.index("-m") + 1
        sys.argv = list(argv[module:])
        importlib.import_module(argv[module]).main()

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = PATIENCE) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a worker", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _start(argv: Sequence[str], **options: Any) -> CopiedWorker | subprocess.Popen[bytes]:
    """A worker as a copy, or anew where autograd's threads run, which a torch built with CUDA starts for good: a copy
    has none of them, and its backward passes are refused."""
    names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
    fresh = any(name.startswith("pt_autograd") for name in names)
    return (subprocess.Popen if fresh else CopiedWorker)(argv, **options)


def copied_workers() -> AbstractContextManager[Any]:
    """A context in which launchers start copies of this process."""
    from tpshard.parallelism.runtime import workers

    names = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    return mock.patch.object(workers, "subprocess", SimpleNamespace(Popen=_start, **names))


def _run(
    code: str, arguments: tuple[str, ...], environment: Mapping[str, str], folder: Path, out: Path, err: Path
) -> None:
    enter(environment, out, err)
    os.chdir(folder)
    sys.path[:0] = [""]
    sys.argv = ["-c", *arguments]
    with copied_workers():
        exec(compile(code, "-c", "exec"), {"__name__": "__main__"})
