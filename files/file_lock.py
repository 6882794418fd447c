"""Locks between processes: locks on files, which the system releases when their holder ends, in whatever way."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Locks an open file until its last descriptor is closed; False where another process holds its lock.

    shared: the lock excludes only those that are not shared. Raises OSError on disks without locks on files.
    """
    import fcntl

    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at `path`: its lock protects nothing once that is removed or replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


@contextlib.contextmanager
def unlocked(path: Path) -> Iterator[bool]:
    """Whether nobody holds a lock on the file at `path`, not even a shared one; within the block nobody can take one.

    True on disks without locks, and where there is no such file.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        yield True
        return
    try:
        free = True
        with contextlib.suppress(OSError):
            free = try_lock(descriptor)
        yield free
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Holds a lock on the file at `path`. On disks without file locks (some network disks) it does nothing."""
    import fcntl

    with path.open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
