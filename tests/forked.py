"""Processes that are copies of one that has imported torch and tpshard, which takes seconds: they start at once."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path

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


def python(
    code: str, *arguments: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """As `python -c CODE ARGUMENTS` in a folder, to its end, where the code does not ask what is imported."""
    with tempfile.TemporaryDirectory() as own:
        out, err = Path(own, "out"), Path(own, "err")
        variables = dict(os.environ if environment is None else environment)
        process = FORKS.Process(target=_run, args=(code, arguments, variables, folder or Path.cwd(), out, err))
        process.start()
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(err.read_text())
        texts = [path.read_text() if path.exists() else "" for path in (out, err)]
        return subprocess.CompletedProcess(code, process.exitcode, *texts)


def _run(
    code: str, arguments: tuple[str, ...], environment: Mapping[str, str], folder: Path, out: Path, err: Path
) -> None:
    enter(environment, out, err)
    os.chdir(folder)
    sys.path[:0] = [""]
    sys.argv = ["-c", *arguments]
    exec(compile(code, "-c", "exec"), {"__name__": "__main__"})
