"""The lock of a run's folder: a lock on the file lock.json, which also says who holds it.

The system releases the lock when its holder ends, in whatever way; a process number would say nothing in a container.
The file that a killed run left is taken over if its lock would be seen here while its holder lived.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpshard.files.atomic import name_new
from tpshard.files.file_lock import is_at, try_lock
from tpshard.train.checkpoints.store_path import Location

ON_THIS_MACHINE = {
    "bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "ntfs3", "overlay", "ramfs", "tmpfs", "vfat",
    "xfs", "zfs",
}  # fmt: skip
"""File systems whose locks are seen by every process of this machine, and by no other machine."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, identified by more than its number, which other processes have too."""

    pid: int
    host: str
    started: str
    """Start times of machine and process; "" where the system does not say."""
    processes: str = ""
    """The namespace of the process's number: containers have their own."""

    @staticmethod
    def this() -> Holder:
        processes = ""
        with contextlib.suppress(OSError):
            processes = os.readlink("/proc/self/ns/pid")
        return Holder(os.getpid(), socket.gethostname(), _start_time(os.getpid()), processes)

    @property
    def boot(self) -> str:
        """The boot of its machine; "" where unknown."""
        return self.started.rpartition(":")[0]

    def is_alive(self) -> bool | None:
        """Whether the process runs; None if its number is of another machine or container."""
        this = Holder.this()
        if (self.host, self.processes) != (this.host, this.processes):
            return None
        return self.boot == this.boot and _start_time(self.pid) == self.started


class Taken(Exception):
    """Another process holds the lock, or held it and is not known to have ended."""

    def __init__(self, path: Location, holder: Holder | None, *, certain: bool):
        who = f"process {holder.pid} on {holder.host}" if holder else f"{path} does not say which"
        self.why = who if certain else f"{who}; whether it has ended cannot be told from here"
        self.fix = "wait for it, or choose another run.dir"
        if not certain:
            self.fix = f"wait for it, choose another run.dir, or remove {path} if that process has ended"
        super().__init__(self.why)


class RunLock:
    """A lock, held until `close` or the end of the process.

    Raises `Taken`, and OSError where the file cannot be written.
    """

    def __init__(self, path: Path):
        self.path = path
        while (descriptor := _create(path) or _take_over(path)) is None:
            pass  # its holder removed it between the two
        self._descriptor = descriptor

    def close(self) -> None:
        """Releases the lock and removes the file, unless it is another's by now."""
        with contextlib.suppress(OSError):
            if is_at(self._descriptor, self.path):
                self.path.unlink()
        os.close(self._descriptor)


def _create(path: Path) -> int | None:
    """Opens a new file, which is locked and says who holds it before it gets its name; None where the name is taken."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with contextlib.suppress(OSError):  # a disk without locks, where the file itself is one
            try_lock(descriptor)
        _write(descriptor)
        name_new(aside, path)
        return descriptor
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, FileExistsError):
            return None
        raise
    finally:
        aside.unlink(missing_ok=True)


def _take_over(path: Path) -> int | None:
    """Opens and locks the file that a killed process left; None if it is gone meanwhile. Raises `Taken`."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        if not try_lock(descriptor):
            raise Taken(path, _read(path), certain=True)
        if is_at(descriptor, path):
            _judge(path)
            _write(descriptor)
            return descriptor
        os.close(descriptor)
        return None
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError) and error.errno in _NO_LOCKS:
            raise Taken(path, _read(path), certain=False) from error
        raise


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without locks."""


def _judge(path: Path) -> None:
    """Raises `Taken` unless the process that wrote the file has certainly ended, as its lock, which is free, tells."""
    holder, this = _read(path), Holder.this()
    if holder is None:
        raise Taken(path, None, certain=False)
    alive = holder.is_alive()
    if alive:  # it holds no lock: of an earlier version
        raise Taken(path, holder, certain=True)
    kind, options = _file_system(path)
    same_boot = holder.boot == this.boot != ""
    everywhere = kind in ("ceph", "gpfs") or (kind == "lustre" and "flock" in options)
    everywhere = everywhere or (kind in ("nfs", "nfs4") and "local_lock=none" in options)
    here = kind in ON_THIS_MACHINE and (same_boot or holder.host == this.host)
    if not (everywhere or here or (same_boot and alive is False)):
        raise Taken(path, holder, certain=False)


def _write(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(vars(Holder.this())).encode(), 0)
    os.fsync(descriptor)


def _read(path: Path) -> Holder | None:
    try:
        value: Any = json.loads(path.read_bytes())
        return Holder(int(value["pid"]), str(value["host"]), str(value["started"]), str(value.get("processes", "")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _file_system(path: Path) -> tuple[str, list[str]]:
    """The type and the mount options of the file system that holds `path`."""
    import psutil

    whole = path.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if whole.is_relative_to(part.mountpoint)]
    mount = max(enumerate(mounts), key=lambda item: (len(item[1].mountpoint), item[0]), default=None)
    return ("", []) if mount is None else (mount[1].fstype, mount[1].opts.split(","))


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
