"""The files of a run in an object store beside its checkpoints: what travels with it between hosts.

A run writes its files to a folder of this host. The small ones are copied to the store: at its start, with every
checkpoint and at its end. The start on another host, and commands that read the run, fetch them from there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.files.atomic import write_bytes
from tpshard.recipes.keys.schema import Recipe
from tpshard.train.checkpoints.store_path import Location, StorePath, location, require_store
from tpshard.train.data.sample import cache_dir
from tpshard.train.records.records import as_lines

logger = logging.getLogger(__name__)

RECORDS = ("metrics.jsonl", "logs/checkpoints.jsonl")
"""Files that a run appends to: of two copies, the one whose last row is later is the run's."""
FILES = ("recipe.yaml", "plan.json", "wandb/id", *RECORDS)
FOLDERS = ("model/",)
_TAGS = ".store.json"
"""The file that says which objects a folder's files were fetched from."""


def run_place(recipe: Recipe) -> Location:
    """Where the run is: its folder, or its place in an object store."""
    return recipe.run.folder if recipe.run.store is None else location(recipe.run.store)


class RunStore:
    """A run's small files in a store, and their copies in a folder of this host."""

    def __init__(self, place: StorePath, folder: Path):
        self.place, self.folder = place, folder
        self._known: dict[str, tuple[int, int]] = {}

    def pull(self) -> None:
        """Fetches the files that this host does not have as they are in the store. OSError where that fails."""
        tags, stored = self._tags(), self.place.files()
        for name, one in stored.items():
            path = self.folder / name
            if not _travels(name) or (path.is_file() and one.tag and tags.get(name) == one.tag):
                continue
            data = (self.place / name).read_bytes()
            if name not in RECORDS or _last_time(data) > _last_time(_bytes_of(path)):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(path, data)
                self._known[name] = _state(path)
            tags[name] = one.tag
        with contextlib.suppress(OSError):
            write_bytes(self.folder / _TAGS, json.dumps({"place": str(self.place), "tags": tags}).encode())

    def push(self) -> None:
        """Copies the files that have changed here since they were fetched or copied. OSError where that fails."""
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if _travels(name) and path.is_file() and self._known.get(name) != (state := _state(path)):
                (self.place / name).write_bytes(path.read_bytes())
                self._known[name] = state

    def _tags(self) -> dict[str, str]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads((self.folder / _TAGS).read_bytes())
            if kept["place"] == str(self.place):
                return dict(kept["tags"])
        return {}


def fetched_run(place: StorePath, required: bool = True) -> Path:
    """A folder of this host, in the user's cache, with the small files of a run in a store.

    required: whether there must be a run, not just a checkpoint below this prefix.

    Raises:
        Mistakes: exit 5 where the store cannot be reached, 7 where no run is there.
    """
    require_store(place)
    folder = cache_dir() / "runs" / place.scheme / place.bucket / place.key
    if required and not (place / "recipe.yaml").is_file():
        hugging_face = (place / "config.json").is_file()
        if place.parent.name == "checkpoints":
            raise Mistakes.one(
                f"there is no checkpoint {place}", exit=Exit.CHECKPOINT, why="it has no manifest.json",
                fix=f"name another, or the run: {place.parent.parent}",
            )  # fmt: skip
        what = "a Hugging Face folder" if hugging_face else "nothing of a run"
        raise Mistakes.one(
            f"there is no run in {place}", exit=Exit.CHECKPOINT, why=f"{what}: it has no recipe.yaml",
            fix="copy the folder to this host and name that" if hugging_face else "name a run, or one of its "
            "checkpoints, as PLACE/checkpoints/step-NNNNNN",
        )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    RunStore(place, folder).pull()
    return folder


def append_to_store(place: StorePath, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Appends rows to metrics.jsonl of a run in a store; False, and nothing is done, while the run goes on."""
    if (place / "lock.json").is_file():
        return False
    record = place / "metrics.jsonl"
    data = record.read_bytes()
    cut = b"\n" if data and not data.endswith(b"\n") else b""
    record.write_bytes(data + cut + as_lines(rows).encode())
    return True


def _travels(name: str) -> bool:
    return name in FILES or (name.startswith(FOLDERS) and not Path(name).name.startswith("."))


def _state(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _last_time(rows: bytes) -> float:
    """The time of the last whole row; -1 without any."""
    for line in reversed(rows.splitlines()):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            row: Any = json.loads(line)
            return float(row["time"])
    return -1.0
