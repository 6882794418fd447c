"""Folders and files that appear complete or not at all: written under a temporary name, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def write_aside(out: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary folder, which becomes `out` when the block ends without an error and is removed otherwise.

    FileExistsError if `out` is a file or a folder that is not empty, unless `overwrite`; a folder that contains the
    working directory is never replaced. Temporary folders of killed writers are removed.
    """
    import psutil

    place = Path(out).absolute()
    _check(place, overwrite)
    place.parent.mkdir(parents=True, exist_ok=True)
    for left in place.parent.glob(f".{place.name}.writing-*"):
        writer = left.name.rpartition("-")[2]
        if writer.isdigit() and not psutil.pid_exists(int(writer)):
            shutil.rmtree(left, ignore_errors=True)
    aside = place.parent / f".{place.name}.writing-{os.getpid()}"
    aside.mkdir()
    try:
        yield aside
        for file in sorted(aside.rglob("*")):
            sync(file)
        sync(aside)
        _check(place, overwrite)
        _replace(aside, place)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync(place.parent)


def _check(place: Path, overwrite: bool) -> None:
    if not os.path.lexists(place):
        return
    empty = place.is_dir() and not place.is_symlink() and not any(place.iterdir())
    if not empty and not overwrite:
        raise FileExistsError(f"{place} exists; name a new folder, or allow overwriting")
    if overwrite and Path.cwd().is_relative_to(place.resolve()):
        raise FileExistsError(f"{place} contains the working directory and is not replaced")


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
    """Writes `text` to a file in UTF-8. FileExistsError if it exists and `overwrite` is false; OSError as any write."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        sync(aside)
        if overwrite:
            aside.replace(path)
        else:
            path.hardlink_to(aside)  # fails when another process was faster
    finally:
        aside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Syncs a file or a folder, so that new and renamed files in a folder survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
