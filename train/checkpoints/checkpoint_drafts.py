"""A checkpoint from its first file to its manifest, and its end: in a folder by renaming, in a store by the manifest.

A folder's draft is written as `.step-NNNNNN.tmp`, which is renamed. A store has no renaming: the objects of a draft
have names of their own, and the manifest, which is written last and names them, replaces that of an earlier checkpoint
of the step at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from tpshard.files.atomic import sync
from tpshard.files.file_lock import unlocked
from tpshard.models.folders.folder_files import carried
from tpshard.train.checkpoints.shards import write_synced
from tpshard.train.checkpoints.store_path import Location, StorePath

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
RECIPE = "recipe.yaml"
ASIDE = "superseded.json"
"""The manifest, in a store, of a checkpoint that was moved aside."""


class Draft(Protocol):
    """A checkpoint that is being written. `begin`, `finish` and `abandon` are called on rank 0 only."""

    def begin(self) -> None:
        """Makes room for the files of all ranks."""

    def part(self, rank: int) -> Location:
        """The file of a rank."""

    def finish(self, files: Mapping[str, Any], manifest: bytes) -> None:
        """Makes the checkpoint exist. Raises OSError where a file of the manifest is not there."""

    def abandon(self) -> None:
        """Removes what was written, as far as it can be."""


class FolderDraft:
    """A draft in a folder that all ranks share."""

    def __init__(self, final: Path):
        self.final, self.work = final, final.parent / f".{final.name}.tmp"

    def begin(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)

    def part(self, rank: int) -> Path:
        if not self.work.is_dir():
            raise OSError(f"{self.work} is not here: run.dir is not on a disk that all hosts share")
        return self.work / f"rank-{rank:05d}.safetensors"

    def finish(self, files: Mapping[str, Any], manifest: bytes) -> None:
        for name, file in files.items():
            _check_size(self.work / name, file["bytes"])
        write_synced(self.work / MANIFEST, [manifest])
        self._keep_run_files()
        sync(self.work)
        replaced = self.final.parent / f".{self.final.name}.replaced"
        if self.final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            self.final.rename(replaced)
        self.work.rename(self.final)
        sync(self.final.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def _keep_run_files(self) -> None:
        """Links the run's recipe and what it carries into the checkpoint, so that one that is copied out of the run can
        be served, evaluated and exported. A failure leaves a checkpoint that trains on."""
        run = self.final.parent.parent
        with contextlib.suppress(OSError):
            for source in (run / RECIPE, *carried(run).rglob("*")):
                target = self.work / source.relative_to(run)
                if source.is_file():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    try:
                        os.link(source, target)
                    except OSError:  # a disk without links
                        shutil.copyfile(source, target)

    def abandon(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)


class StoreDraft:
    """A draft in a store, whose objects carry the save's own name."""

    def __init__(self, final: StorePath, attempt: str):
        self.final, self.mark = final, attempt[:12]

    def begin(self) -> None:
        """Nothing: objects need no folder."""

    def part(self, rank: int) -> StorePath:
        return self.final / f"rank-{rank:05d}-{self.mark}.safetensors"

    def finish(self, files: Mapping[str, Any], manifest: bytes) -> None:
        stored = self.final.files()
        for name, file in files.items():
            if name not in stored or stored[name].size != file["bytes"]:
                raise OSError(f"{self.final / name} is not there, or not of {file['bytes']} bytes")
        (self.final / MANIFEST).write_bytes(manifest)
        with contextlib.suppress(OSError):  # the next start removes them
            for name in stored.keys() - files.keys() - {MANIFEST}:
                (self.final / name).unlink()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            for name in self.final.files():
                if self.mark in name:
                    (self.final / name).unlink()
            self.final.clear_uploads()


def remove(checkpoint: Location) -> None:
    """Removes a checkpoint: first what makes it one. In a folder, one that a process reads stays."""
    if isinstance(checkpoint, StorePath):
        (checkpoint / MANIFEST).unlink()
        for name in checkpoint.files():
            (checkpoint / name).unlink()
        return
    doomed = checkpoint.parent / f".{checkpoint.name}.deleted"
    with unlocked(checkpoint / MANIFEST) as unread:
        if not unread:
            return
        checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def move_aside(checkpoint: Location) -> str:
    """Keeps the files of a checkpoint so that nothing resumes from them; returns what was done."""
    if isinstance(checkpoint, StorePath):
        (checkpoint / ASIDE).write_bytes((checkpoint / MANIFEST).read_bytes())
        (checkpoint / MANIFEST).unlink()
        return f"its {MANIFEST} is now {ASIDE}"
    aside = checkpoint.parent / f"superseded-{checkpoint.name}"
    while aside.exists():
        aside = aside.with_name(aside.name + "-")
    checkpoint.rename(aside)
    return f"renamed to {aside.name}"


def remove_leftovers(directory: Location) -> None:
    """Removes or completes what killed saves left in a run's `checkpoints`. Raises OSError where it cannot."""
    if isinstance(directory, StorePath):
        leftovers = list(_leftovers(directory))
        for name in leftovers:
            (directory / name).unlink()
        uploads = directory.clear_uploads()
        if leftovers or uploads:
            logger.info("a save that was not finished: removed %d files and %d uploads", len(leftovers), uploads)
        return
    for path in sorted(directory.iterdir()):
        if match := re.fullmatch(r"\.(step-\d{6,})\.(tmp|deleted|replaced)", path.name):
            if match.group(2) == "replaced" and not (directory / match.group(1)).exists():
                path.rename(directory / match.group(1))  # killed between the two renames of an overwrite
            else:
                shutil.rmtree(path, ignore_errors=True)


def _leftovers(directory: StorePath) -> Iterator[str]:
    """The files of a store's `step-*` that no manifest names."""
    by_step: dict[str, set[str]] = {}
    for name in directory.files():
        if re.fullmatch(r"step-\d{6,}/[^/]+", name):
            step, _, file = name.partition("/")
            by_step.setdefault(step, set()).add(file)
    for step, files in by_step.items():
        named = {MANIFEST, ASIDE}
        for kind in named & files:
            try:
                named = named | json.loads((directory / step / kind).read_bytes())["files"].keys()
            except (ValueError, KeyError, TypeError, AttributeError):  # damaged: not ours to remove
                named = named | files
        yield from (f"{step}/{file}" for file in sorted(files - named))


def _check_size(path: Path, size: int) -> None:
    if not path.is_file() or path.stat().st_size != size:
        raise OSError(f"{path} is not there, or not of {size} bytes: run.dir is not on a disk that all hosts share")
