"""A run's folder: its files, and the lock that lets one process write to it.

recipe.yaml  plan.json  metrics.jsonl  checkpoints/  logs/  wandb/

Of a run in an object store the checkpoints are there, and copies of the small files (see `run_store`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from tpshard.diagnostics.diagnostic import Exit, Mistakes, Source
from tpshard.files.atomic import write_file
from tpshard.train.checkpoints import checkpoint
from tpshard.train.checkpoints.store_path import Location, StoreError, StorePath
from tpshard.train.records.records import last_attempt, last_saved
from tpshard.train.run.run_lock import RunLock, Taken
from tpshard.train.run.run_store import RunStore
from tpshard.train.run.store_lock import StoreLock

logger = logging.getLogger(__name__)


class RunDir:
    """The folder of a run, locked for this process.

    Opening creates and locks it, and repairs what a killed run left. Only the main rank opens it; the others read
    paths. Use as a context manager, or call `close`.

    Raises:
        Mistakes: exit 5; another run uses the folder, or it cannot be written.
        StoreError: the store fails.
    """

    def __init__(
        self, path: Path, *, store: StorePath | None = None, where: Source | None = None,
        say: Callable[[str], None] = lambda text: None,
    ):  # fmt: skip
        """store: the run's place in an object store, which is locked too. say: receives a line before a wait for
        another host's run."""
        self.path, self.place = path, store or path
        self._where = where
        self._store = None if store is None else RunStore(store, path)
        self._store_lock: StoreLock | None = None
        with contextlib.ExitStack() as opened:
            try:
                # a run whose checkpoints are gone is refused: they can be put back where nothing is
                for folder in (self.checkpoints, self.logs) if self.lost_step is None else (self.logs,):
                    if isinstance(folder, Path):
                        folder.mkdir(parents=True, exist_ok=True)
                opened.callback(RunLock(path / "lock.json").close)
                if store is not None:
                    self._store_lock = StoreLock(store / "lock.json", say=say)
                    opened.callback(self._store_lock.close)
            except Taken as taken:
                raise Mistakes.one(
                    f"another run uses {self.place}", exit=Exit.MACHINE, where=where, why=taken.why, fix=taken.fix
                ) from taken
            except StoreError:
                raise
            except OSError as error:
                raise self._unwritable(error) from error
            if self._store is not None:
                self._store.pull()
            checkpoint.clean(self.checkpoints)
            self._opened = opened.pop_all()
        self.attempt = last_attempt(self.metrics) + 1
        """1 for a new run, counted from metrics.jsonl."""

    @property
    def checkpoints(self) -> Location:
        return self.place / "checkpoints"

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

    @property
    def lost_step(self) -> int | None:
        """The step of the last checkpoint that was saved here, if there is none any more."""
        if checkpoint.steps(self.checkpoints):
            return None
        return last_saved(self.path)

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

    def check_lock(self) -> None:
        """Raises OSError if another run has taken the run's place in a store meanwhile."""
        if self._store_lock is not None:
            self._store_lock.check()

    def push(self) -> None:
        """Copies what has changed of the small files to the store, if the run is in one. A failure is a warning."""
        try:
            if self._store is not None:
                self._store.push()
        except OSError as error:
            logger.warning("the records of the run were not copied to %s: %s", self.place, error)

    def close(self) -> None:
        """Copies the records to the store, and releases the locks."""
        self.push()
        self._opened.close()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
