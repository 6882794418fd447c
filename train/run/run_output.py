"""What the ranks of a run print: to the terminal, above the progress bar and to log files."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpshard.parallelism.runtime import messages
from tpshard.parallelism.runtime.context import Context
from tpshard.recipes.keys.schema import Recipe
from tpshard.train.records.progress import Progress, progress_for

logger = logging.getLogger("tpshard")
"""Its warnings are shown above the progress bar, and kept in the log file of their rank."""


def say(text: str, stream: Any = None) -> None:
    with contextlib.suppress(OSError, ValueError):  # stdout is closed, as by `| head`.
        print(text, end="", file=stream or sys.stdout, flush=True)


def keep_output(folder: Path, context: Context) -> None:
    """Redirects the output of ranks other than 0, C libraries included, to a log file per rank; rank 0 logs to its
    file.

    Stacks of crashes go to these files too. The launcher is told their names.
    """
    handler: logging.Handler
    path = (folder / "logs" / f"rank-{context.rank}.log").resolve()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        messages.send("log", text=str(path), progress=os.fstat(descriptor).st_size)
        if context.is_main:
            faulthandler.enable(descriptor)  # the descriptor stays open for it
        else:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)
    handler = _QuietFile(path, delay=True) if context.is_main else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)


class _QuietFile(logging.FileHandler):
    """A log file that ignores a full disk, which other parts of the run report."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class _Notes(logging.Handler):
    """Shows warnings and the run's own log messages above the progress bar."""

    def __init__(self, progress: Progress):
        super().__init__(logging.INFO)
        self.progress = progress

    def emit(self, entry: logging.LogRecord) -> None:
        prefix = "warning: " if entry.levelno >= logging.WARNING else ""
        self.progress.note(prefix + entry.getMessage())


@contextlib.contextmanager
def display(recipe: Recipe, context: Context) -> Iterator[Progress]:
    progress = progress_for(recipe.train.steps, main=context.is_main)
    notes = _Notes(progress)
    logger.addHandler(notes)
    try:
        yield progress
    finally:
        logger.removeHandler(notes)
        progress.close()
