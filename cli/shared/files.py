"""Writes files atomically, without overwriting unless asked to."""

from __future__ import annotations

import re
from pathlib import Path

from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.files.atomic import check_kind, write_file


def write(path: Path, text: str, *, overwrite: bool = False) -> None:
    """Writes `text` to `path` through a temporary file and a rename. Missing folders are created.

    Raises `Mistakes`: exit 2 if the file exists and `overwrite` is false, exit 5 if it cannot be written.
    """
    refuse(path, overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text, overwrite=overwrite)
    except FileExistsError:
        raise _exists_error(path) from None
    except OSError as error:
        why, fix = error.strerror or str(error), "choose a writable folder, on a disk with room"
        raise Mistakes.one(f"{path} cannot be written", exit=Exit.MACHINE, why=why, fix=fix) from error


def refuse(path: Path, overwrite: bool) -> None:
    """Raises `Mistakes` (exit 2) if `path` may not be written. Slow commands call it before they start."""
    _refuse_store(path)
    exists = _exists(path)
    if path.is_dir():
        raise Mistakes.one(f"{path} is a folder", exit=Exit.USAGE, fix="give the name of a file")
    if exists:
        _check_kind(path, folder=False)
        if not overwrite:
            raise _exists_error(path)


def refuse_folder(path: Path, overwrite: bool) -> None:
    """`refuse` for a folder, which may exist if it is empty."""
    _refuse_store(path)
    if _exists(path):
        _check_kind(path, folder=True)
        if not overwrite and any(path.iterdir()):
            raise _exists_error(path)


def _refuse_store(path: Path) -> None:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", str(path)):
        raise Mistakes.one(
            f"{str(path).replace(':/', '://', 1)} is not on this machine", exit=Exit.USAGE,
            fix="name a folder or file of this machine, and copy it to the store with the store's own tool",
        )  # fmt: skip


def _check_kind(path: Path, *, folder: bool) -> None:
    try:
        check_kind(path, folder=folder)
    except FileExistsError as error:
        raise Mistakes.one(str(error), exit=Exit.USAGE, fix="choose another name") from None


def _exists(path: Path) -> bool:
    """Whether the name is taken. Raises OSError for one that no file can have: too long, or beyond a loop of links."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _exists_error(path: Path) -> Mistakes:
    return Mistakes.one(f"{path} exists", exit=Exit.USAGE, fix="choose another name, or --overwrite")
