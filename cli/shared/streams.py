"""Standard streams that may be closed, full or without a reader: that changes nothing of what a command does."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import Any

from tpshard.diagnostics.diagnostic import Exit, Mistakes


class TolerantWriter(io.RawIOBase):
    """A descriptor whose first failure to write is kept; what follows it is dropped."""

    def __init__(self, descriptor: int):
        super().__init__()
        self._descriptor = descriptor
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        while self.failure is None:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:  # a pipe that its other end has made non-blocking
                select.select([], [self._descriptor], [])
            except OSError as error:
                self.failure = error
        return size

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


def prepare() -> None:
    """Makes the standard streams robust: see `TolerantWriter`; characters that the locale lacks are escaped.

    A closed descriptor is opened on the null device, or the next file to be opened would get its number, and with it
    what C libraries and other processes print.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
            os.set_inheritable(descriptor, True)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        settings: dict[str, Any] = {"encoding": "utf-8", "line_buffering": descriptor == 2}
        if isinstance(stream, io.TextIOWrapper):
            settings = {key: getattr(stream, key) for key in ("encoding", "line_buffering", "write_through")}
        elif stream is not None:
            continue  # replaced by a caller
        raw = TolerantWriter(descriptor)
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", **settings))


def require_written() -> None:
    """Raises `Mistakes` (exit 5) where stdout could not be written; not where its reader had read enough."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    error = raw.failure if isinstance(raw, TolerantWriter) else None
    if error is not None and not isinstance(error, BrokenPipeError):
        raise Mistakes.one(
            f"stdout cannot be written: {error.strerror}", exit=Exit.MACHINE,
            fix="make room where it goes, or send it elsewhere, and run the command again",
        ) from error  # fmt: skip
