"""A run's folder: its files, and the lock that lets one process write to it.

recipe.yaml  plan.json  metrics.jsonl  checkpoints/  logs/  wandb/
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpshard.models.aside import write_file
from tpshard.models.file_lock import one_at_a_time
from tpshard.recipes.diagnostic import Exit, Mistakes, Source
from tpshard.train import checkpoint
from tpshard.train.records import last_attempt


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, identified by more than its pid, because a later process may get that."""

    pid: int
    host: str
    started: str
    """Start times of machine and process; "" where the system does not say."""

    @staticmethod
    def this() -> Holder:
        return Holder(os.getpid(), socket.gethostname(), _start_time(os.getpid()))

    def is_gone(self) -> bool:
        """Whether the process has certainly ended. Processes of other hosts are never certain."""
        return self.host == socket.gethostname() and _start_time(self.pid) != self.started


class RunDir:
    """The folder of a run, locked for this process.

    Opening creates and locks it, and repairs what a killed run left. Only the main rank opens it; the others read
    paths. Use as a context manager, or call `close`.

    Raises:
        Mistakes: exit 5; another run uses the folder, or it cannot be written.
    """

    def __init__(self, path: Path, *, where: Source | None = None):
        self.path = path
        self._where = where
        try:
            for folder in (self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock()
        except OSError as error:
            raise self._unwritable(error) from error
        checkpoint.clean(self.checkpoints)
        self.attempt = last_attempt(self.metrics) + 1
        """1 for a new run, counted from metrics.jsonl."""

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def wandb_id(self) -> str:
        """wandb's id of this run, created once, so that a resumed run continues the same wandb run."""
        path = self.path / "wandb" / "id"
        with contextlib.suppress(OSError):
            if re.fullmatch(r"[a-z0-9]{1,64}", stored_id := path.read_text().strip()):
                return stored_id
        new_id = secrets.token_hex(4)
        with contextlib.suppress(OSError):  # if the disk fails, wandb gets a new run; training continues
            path.parent.mkdir(exist_ok=True)
            path.write_text(new_id + "\n")
        return new_id

    def write(self, name: str, text: str) -> Path:
        """Writes a file of the folder, complete or not at all. Raises `Mistakes` (exit 5)."""
        path = self.path / name
        try:
            write_file(path, text)
        except OSError as error:
            raise self._unwritable(error) from error
        return path

    def _unwritable(self, error: OSError) -> Mistakes:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return Mistakes.one(
            f"the run's folder {self.path} cannot be written",
            exit=Exit.MACHINE,
            where=self._where,
            why=(error.strerror or str(error)) + (f", on {_disk(self.path)}" if full else ""),
            fix="make room, or another run.dir" if full else "another run.dir",
        )

    def close(self) -> None:
        """Releases the lock."""
        with contextlib.suppress(OSError):
            if _read(self._lock_path) == Holder.this():
                self._lock_path.unlink()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _lock_path(self) -> Path:
        return self.path / "lock.json"

    def _lock(self) -> None:
        mine = Holder.this()
        # two processes that see the same dead holder must not remove each other's new lock
        with one_at_a_time(self.path / ".lock.guard"):
            for _ in range(3):
                if self._claim(mine):
                    return
                holder = _read(self._lock_path)
                if holder is not None and holder.is_gone():
                    self._lock_path.unlink(missing_ok=True)
                    continue
                break
        raise Mistakes.one(
            f"another run uses {self.path}",
            exit=Exit.MACHINE,
            where=self._where,
            why=f"process {holder.pid} on {holder.host}" if holder else f"{self._lock_path} does not say which",
            fix=f"wait for it, choose another run.dir, or remove {self._lock_path} if that process has ended",
        )

    def _claim(self, mine: Holder) -> bool:
        """Creates the lock with its content, unless there is one."""
        try:
            write_file(self._lock_path, json.dumps(vars(mine)), overwrite=False)
            return True
        except FileExistsError:
            return False


def _disk(path: Path) -> str:
    """`the disk at /home, 12.0 of 50.0 MiB free`, for the file system of `path`."""
    mount = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    while not mount.is_mount():
        mount = mount.parent
    try:
        usage = shutil.disk_usage(mount)
    except OSError:
        return f"the disk at {mount}"
    return f"the disk at {mount}, {usage.free / 2**20:,.1f} of {usage.total / 2**20:,.1f} MiB free"


def _read(path: Path) -> Holder | None:
    try:
        value: Any = json.loads(path.read_bytes())
        return Holder(int(value["pid"]), str(value["host"]), str(value["started"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _start_time(pid: int) -> str:
    """Boot time and start time of a living process; "" for an ended one (or a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return "" if fields[0] in "ZX" else f"{boot}:{fields[19]}"
    except (OSError, IndexError):
        pass
    if Path("/proc/self/stat").exists():
        return ""
    import psutil

    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return ""
