"""A lock between processes: a lock on a file, which the system releases when its holder ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Holds a lock on the file at `path`. On disks without file locks (some network disks) it does nothing."""
    import fcntl

    with path.open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
