"""What a worker tells its launcher over a pipe: that it is ready, that it stalls, how it failed. Knows no torch."""

from __future__ import annotations

import json
import os
import re
import select
import time
from dataclasses import asdict, dataclass
from typing import Literal

REPORT_FD = "TPSHARD_REPORT_FD"
"""Number of the pipe's writing end, set by tpshard's own launcher."""

Kind = Literal["ready", "failed", "secondary", "stalled", "log", "step"]
"""`log` says in which file the worker's output continues, `step` which one is done."""


class WorkerFault(RuntimeError):
    """A fault of the run rather than of one computation: a full sentence, an exit code, and what to do about it."""

    def __init__(self, message: str, *, exit: int, why: str = "", fix: str = ""):
        super().__init__(message)
        self.message, self.exit, self.why, self.fix = message, exit, why, fix


@dataclass(frozen=True)
class WorkerMessage:
    """One line on the pipe."""

    rank: int
    kind: Kind
    text: str = ""
    exit: int = 0
    time: float = 0.0
    """Seconds of the monotonic clock, which all processes of a host share."""
    progress: int = 0
    """Of a stalled worker: how many steps and collectives it got through. Of a log: the bytes that it held before. Of a
    step: its number."""
    waiting: bool = False
    """Of a stalled worker: it is inside a collective, so others may be to blame."""

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def parse(line: bytes) -> WorkerMessage | None:
    """A report, or None where a dying worker left half a line."""
    try:
        return WorkerMessage(**json.loads(line))
    except (ValueError, TypeError):
        return None


def send(
    kind: Kind, *, text: str = "", exit: int = 0, progress: int = 0, waiting: bool = False, droppable: bool = False
) -> bool:
    """Tells the launcher, if there is one of ours. True when it takes over telling the user.

    What is `droppable` is left out while the pipe is full, as it becomes when the launcher was stopped (Ctrl-Z).
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
        return False  # The launcher is gone; this worker is about to follow it.
    return True


_LOST_PEER = re.compile(
    r"connection (?:closed|reset|refused|was closed|lost)|broken pipe|connectfullmesh failed|remote process exited"
    r"|socket (?:timeout|closed)|timed out waiting|failed to (?:recv|send|connect)|peer(?: has)? (?:closed|failed)"
    r"|nccl communicator (?:was )?aborted|store.*(?:get|wait|set).*fail|wait timeout|timed out after \d+",
    re.IGNORECASE,
)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error only says that another worker went away: the consequence of a failure, not its cause."""
    if isinstance(error, WorkerFault):
        return False
    name = type(error).__name__
    if name in ("DistNetworkError", "DistStoreError"):
        return True
    of_torch = isinstance(error, RuntimeError) or name.startswith("Dist")
    return of_torch and _LOST_PEER.search(str(error)) is not None
