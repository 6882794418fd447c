"""Folders and files that appear complete or not at all: written under a temporary name, then renamed."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tpshard.files.file_lock import is_at, try_lock, unlocked

_LOCK = "lock.json"
"""The file that the process of a run holds a lock on."""
_LONGEST = 200
"""Bytes of a name that its temporary name repeats: file systems accept 255."""


class NeverReplaced(FileExistsError):
    """What is there is not replaced, whether or not overwriting is allowed."""


@contextmanager
def write_aside(out: str | os.PathLike[str], *, overwrite: bool = False, of_own_run: bool = False) -> Iterator[Path]:
    """Yields a temporary folder, which becomes `out` when the block ends without an error and is removed otherwise.

    of_own_run: `out` is a part of the run whose lock this process holds. A part of another's is never replaced.

    FileExistsError if `out` is a folder that is not empty, unless `overwrite`; a folder that contains the working
    directory, and anything that is no folder, is never replaced. Temporary folders of killed writers are removed.
    """
    place = Path(out).absolute()
    _check(place, overwrite, of_own_run)
    place.parent.mkdir(parents=True, exist_ok=True)
    _remove_dead(place)
    with _own_folder(place) as aside:
        yield aside
        for file in sorted(aside.rglob("*")):
            sync(file)
        sync(aside)
        _check(place, overwrite, of_own_run)
        _replace(aside, place)
        sync(place.parent)


@contextmanager
def _own_folder(place: Path) -> Iterator[Path]:
    """Yields a new folder beside `place` and removes it afterwards, if it is still there.

    The lock on a file beside it says that its writer lives: a process number would not, since in a container every
    process may be number 1.
    """
    while True:
        aside = _beside(place, f"writing-{secrets.token_hex(8)}")
        lock = aside.with_name(f"{aside.name}.lock")
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with suppress(OSError):  # a disk without locks, where nobody judges a writer dead
                try_lock(descriptor)
            if not is_at(descriptor, lock):
                continue  # another writer took it for a dead one's, before it was locked
            aside.mkdir()
            yield aside
            return
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            lock.unlink(missing_ok=True)
            os.close(descriptor)


def _remove_dead(place: Path) -> None:
    """Removes the temporary folders of `place` whose writers have ended, as their locks tell."""
    start, names = _beside(place, "writing-").name, list[str]()
    with suppress(OSError):
        names = os.listdir(place.parent)
    for name in names:
        if name.startswith(start) and name.endswith(".lock"):
            with suppress(OSError):  # one that cannot be judged stays
                _remove_if_dead(place.with_name(name))


def _remove_if_dead(lock: Path) -> None:
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if try_lock(descriptor) and is_at(descriptor, lock):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink()
    finally:
        os.close(descriptor)


def _beside(place: Path, kind: str) -> Path:
    """A hidden name beside `place`, which a file system accepts wherever it accepts that of `place`."""
    return place.with_name(f".{os.fsdecode(os.fsencode(place.name)[:_LONGEST])}.{kind}")


def _check(place: Path, overwrite: bool, of_own_run: bool) -> None:
    if not os.path.lexists(place):
        return
    check_kind(place, folder=True)
    empty = place.is_dir() and not place.is_symlink() and not any(place.iterdir())
    if not empty and not overwrite:
        raise FileExistsError(f"{place} exists; name a new folder, or allow overwriting")
    if overwrite and Path.cwd().is_relative_to(place.resolve()):
        raise NeverReplaced(f"{place} contains the working directory and is not replaced")
    for lock in (*([] if of_own_run else [place.parent / _LOCK]), place / _LOCK, *place.glob(f"*/{_LOCK}")):
        with unlocked(lock) as free:
            if not free:
                raise NeverReplaced(f"{place} belongs to a run that goes on, or holds one, and is not replaced")


def check_kind(place: Path, *, folder: bool) -> None:
    """Raises NeverReplaced if `place` is something that a folder, or else a file, never replaces: a device, a pipe, a
    socket, or one of the other kind."""
    mode = place.stat().st_mode if place.exists() else place.lstat().st_mode  # of a link to nothing
    if stat.S_ISDIR(mode):
        if not folder:
            raise NeverReplaced(f"{place} exists and is a folder, which a file does not replace")
    elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):
        if folder:
            raise NeverReplaced(f"{place} exists and is a file, which a folder does not replace")
    else:
        raise NeverReplaced(f"{place} exists and is a device, a pipe or a socket, which nothing replaces")


def _replace(aside: Path, place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        old = aside.with_name(aside.name.replace(".writing-", ".replaced-"))
        place.rename(old)
        aside.rename(place)
        shutil.rmtree(old, ignore_errors=True)
        return
    if os.path.lexists(place):
        place.unlink()
    aside.rename(place)


def write_file(path: Path, text: str, *, overwrite: bool = True) -> None:
    """Writes `text` to a file in UTF-8. FileExistsError if it exists and `overwrite` is false, or is no file; OSError
    as any write."""
    write_bytes(path, text.encode("utf-8"), overwrite=overwrite)


def write_bytes(path: Path, data: bytes, *, overwrite: bool = True) -> None:
    """`write_file` for bytes."""
    if os.path.lexists(path):
        check_kind(path, folder=False)
    aside = _beside(path, secrets.token_hex(8))
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(data)
        sync(aside)
        if overwrite:
            aside.replace(path)
        else:
            name_new(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def name_new(aside: Path, path: Path) -> None:
    """Names a file `path`, too. FileExistsError where another process was faster."""
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError:  # a disk without hard links: the empty file takes the name, and is replaced
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        aside.replace(path)


def sync(path: Path) -> None:
    """Syncs a file or a folder, so that new and renamed files in a folder survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
