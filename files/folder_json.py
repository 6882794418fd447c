"""Reading small files of folders that may come from anybody: names are checked, sizes bounded, nothing is executed."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

LARGEST = 256 << 20
"""Bytes of a JSON file."""


class FolderError(ValueError):
    """A folder that cannot be used; `fix` says what can be done."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


def damaged(message: str) -> FolderError:
    """The error for a file that is cut, missing or changed."""
    return FolderError(message, "copy it again, or name another")


def file_inside(folder: Path, name: str, below: str = "") -> Path:
    """The file `name` of `folder`, or of its folder `below`. ValueError if it is not a plain name, or a link that leads
    out of the folder.

    Links of the hub's cache into the `blobs` folder beside the snapshot are allowed.
    """
    plain = bool(name) and name not in (".", "..") and not any(c in name for c in "/\\\0:")
    if not plain or not name.isprintable():
        raise ValueError(f"{folder}: {name!r} is not the name of a file in this folder")
    try:
        root, target = folder.resolve(strict=True), (folder / below / name).resolve()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{folder / name} cannot be followed: {error}") from error
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    if target.parent not in (root / below, blobs):
        raise ValueError(f"{folder / name} is a link that leads out of the folder, to {target}")
    return target


def read_regular(path: str | os.PathLike[str], most: int = LARGEST) -> bytes:
    """The bytes of a file. ValueError for pipes, devices and sockets, which may never end, and for more than `most`
    bytes; OSError if it cannot be read."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(21, "Is a directory", os.fspath(path))
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file")
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} is larger than {most >> 20} MiB")
    return data


def read_named(name: str, beside: str, most: int = LARGEST) -> tuple[bytes, str] | None:
    """The bytes and path of a file that another one, `beside`, names: looked for where the command runs, then in that
    file's folder. None where neither holds one that `read_regular` reads."""
    for place in (name, os.path.join(os.path.dirname(beside), name)):
        with contextlib.suppress(OSError, ValueError):
            return read_regular(place, most), place
    return None


def parse_object(data: bytes | str, name: object) -> dict[str, Any]:
    """The JSON object in a text. ValueError if it holds anything else; `name` is the file's."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(f"{name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} holds {type(value).__name__}, not a JSON object")
    return value


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in file `name` of a folder. ValueError if it holds anything else, OSError if it is not read."""
    return parse_object(read_regular(file_inside(folder, name)), folder / name)
