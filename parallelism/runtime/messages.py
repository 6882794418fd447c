"""Messages of a worker to its launcher over a pipe: stalled, failed, finished steps. Does not import torch."""

from __future__ import annotations

import json
import os
import re
import select
import time
from dataclasses import asdict, dataclass
from typing import Literal

REPORT_FD = "TPSHARD_REPORT_FD"
"""The environment variable with the number of the pipe's write end, set by tpshard's launcher."""

Kind = Literal["failed", "secondary", "stalled", "log", "step"]
"""`log` names the file of the worker's output, `step` the finished step."""


class WorkerFault(RuntimeError):
    """An error that ends the run, with a message, the process's exit code, a reason and a way to fix it."""

    def __init__(self, message: str, *, exit: int, why: str = "", fix: str = ""):
        super().__init__(message)
        self.message, self.exit, self.why, self.fix = message, exit, why, fix


@dataclass(frozen=True)
class WorkerMessage:
    """A message of a worker, one line on the pipe."""

    rank: int
    kind: Kind
    text: str = ""
    exit: int = 0
    time: float = 0.0
    """Seconds of the monotonic clock, which is the same for all processes of a host."""
    progress: int = 0
    """For a stalled worker, the number of finished steps and collectives; for a log, its previous size in bytes; for a
    step, its number."""
    waiting: bool = False
    """Whether a stalled worker is inside a collective, so that others may be at fault."""

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def parse(line: bytes) -> WorkerMessage | None:
    """Parses a line; returns None for half a line of a dying worker."""
    try:
        return WorkerMessage(**json.loads(line))
    except (ValueError, TypeError):
        return None


def send(
    kind: Kind, *, text: str = "", exit: int = 0, progress: int = 0, waiting: bool = False, droppable: bool = False
) -> bool:
    """Sends a message to tpshard's launcher, if there is one. Returns whether the launcher will inform the user.

    droppable: whether to omit the message while the pipe is full, as when the launcher is suspended (Ctrl-Z).
    """
    fd = os.environ.get(REPORT_FD)
    if fd is None or (droppable and not select.select([], [int(fd)], [], 0)[1]):
        return False
    rank = int(os.environ.get("RANK", "0"))
    data = WorkerMessage(rank, kind, text, exit, time.monotonic(), progress, waiting).line()
    try:
        while data:
            data = data[os.write(int(fd), data) :]
    except OSError:
        return False  # The launcher has ended, and this worker will be ended too.
    return True


_LOST_PEER = re.compile(
    r"connection (?:closed|reset|refused|was closed|lost)|broken pipe|connectfullmesh failed|remote process exited"
    r"|socket (?:timeout|closed)|timed out waiting|failed to (?:recv|send|connect)|peer(?: has)? (?:closed|failed)"
    r"|nccl communicator (?:was )?aborted|store.*(?:get|wait|set).*fail|wait timeout|timed out after \d+",
    re.IGNORECASE,
)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error only reports that another worker is gone, so that it is a consequence of a failure elsewhere."""
    if isinstance(error, WorkerFault):
        return False
    name = type(error).__name__
    if name in ("DistNetworkError", "DistStoreError"):
        return True
    of_torch = isinstance(error, RuntimeError) or name.startswith("Dist")
    return of_torch and _LOST_PEER.search(str(error)) is not None
