"""A cache of plans by content, so that an unchanged recipe is not planned again.

An entry is a folder in `$TPSHARD_CACHE/plans`, else in `$XDG_CACHE_HOME/tpshard/plans` or `~/.cache/tpshard/plans`,
with a plan's report (`report_file`), what its pictures show if one was asked for, and the text of its plan.json. All of
it may be deleted at any time. Its name is a hash of everything a plan depends on: the recipe with the places of its
values, the device file, the model's configuration, versions and headers of weights (also of `serve.checkpoint`; of a
run there its manifest), tpshard's code, torch and Python. A recipe with user code (`model.module`, a custom task) has
no entry, since that code may read anything.

Beside it, `saved-plans` has an empty file for each plan with programs that this account saved, named by its sha256:
`train --plan` runs the programs of these as they are.

Does not import torch.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.files.atomic import write_bytes
from tpshard.files.folder_json import read_regular
from tpshard.models.folders.folder_identity import adapters_identity, folder_identity, weights_identity
from tpshard.models.open_model import manifest_of
from tpshard.plan import saved_plan
from tpshard.programs.fit.recipe_model import model_of
from tpshard.recipes.keys.schema import Recipe

MOST = 64
"""The number of entries kept, the newest ones."""
MOST_OWN = 1000
"""The number of own plans that are remembered, the newest ones."""


@dataclass(frozen=True)
class PlanEntry:
    """The folder in the cache for one plan, with its texts by kind."""

    folder: Path

    def read(self, kinds: Iterable[str]) -> dict[str, str] | None:
        """Reads texts of the plan from the cache; None if one is missing."""
        try:
            texts = {kind: _text(self.folder / f"{kind}.gz") for kind in kinds}
            os.utime(self.folder)
        except (OSError, EOFError, zlib.error, ValueError):
            return None
        return texts

    def write(self, texts: dict[str, str]) -> None:
        """Stores texts of the plan in the cache, each atomically. A folder that cannot be written is ignored."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            for kind, text in texts.items():
                write_bytes(self.folder / f"{kind}.gz", _packed(text))
            entries = sorted(_entries(self.folder.parent), key=lambda entry: entry.stat().st_mtime)
            for old in entries[:-MOST]:
                shutil.rmtree(old, ignore_errors=True)


def _packed(text: str) -> bytes:
    """A text with its sha256, compressed."""
    data = text.encode()
    return gzip.compress(hashlib.sha256(data).digest() + data, 1, mtime=0)


def _text(file: Path) -> str:
    """The text in a file that `_packed` made. ValueError, EOFError, OSError or zlib.error for any other."""
    data = gzip.decompress(read_regular(file))
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise ValueError(f"{file} is damaged")
    return data[32:].decode()


def place() -> Path:
    """The folder of all cached plans, in the user's cache folder for tpshard (`train.sample.cache_dir`)."""
    if own := os.environ.get("TPSHARD_CACHE"):
        return Path(own, "plans")
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "tpshard", "plans")


def remember(plan: str) -> None:
    """Notes that this account saved a plan, so that `is_own` tells. A cache that cannot be written is ignored."""
    with contextlib.suppress(OSError):
        folder = _own_plans()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        notes = sorted(folder.iterdir(), key=lambda note: note.stat().st_mtime)
        for old in notes[:-MOST_OWN]:
            old.unlink()
        (folder / hashlib.sha256(plan.encode()).hexdigest()).touch()


def is_own(plan: str) -> bool:
    """Whether this account saved exactly this plan: `remember` noted it, where nobody else can write."""
    folder = _own_plans()
    try:
        state = folder.stat()
        noted = (folder / hashlib.sha256(plan.encode()).hexdigest()).lstat()
    except OSError:
        return False
    return state.st_uid == noted.st_uid == os.geteuid() and not state.st_mode & 0o022


def _own_plans() -> Path:
    return place().with_name("saved-plans")


def _entries(folder: Path) -> list[Path]:
    """The entries in the cache's folder; anything else in it must never be deleted."""
    return [path for path in folder.iterdir() if re.fullmatch("[0-9a-f]{32}", path.name)]


def entry_of(recipe: Recipe, *inputs: object) -> PlanEntry | None:
    """The cache entry of a recipe's plan; `inputs` are the command's options. None if no hash can cover all inputs."""
    if ":" in recipe.task:
        return None
    try:
        spec = model_of(recipe, weights=False)
        if spec.reads_code:
            return None
        stored = dict(weights_identity(spec.source.folder)) if spec.source.folder is not None else {}
        if Path(recipe.serve.checkpoint, "config.json").is_file():
            stored |= {**folder_identity(recipe.serve.checkpoint), **weights_identity(recipe.serve.checkpoint)}
        elif (manifest := manifest_of(Path(recipe.serve.checkpoint))) is not None:
            stored[str(manifest)] = hashlib.sha256(read_regular(manifest)).hexdigest()
        for folder in recipe.serve.adapters.values():
            stored |= adapters_identity(folder)
        made_with = json.dumps([saved_plan.versions(recipe), stored], sort_keys=True)
        parts = [recipe.to_yaml(resolved=True), recipe.file, repr(recipe._places), repr(inputs), made_with]
    except (Mistakes, ValueError, OSError):
        return None  # planning reports the error
    key = hashlib.sha256()
    for part in (*parts, saved_plan.code_of(["plan"]), *_gpus()):
        key.update(hashlib.sha256(part.encode()).digest())
    return PlanEntry(place() / key.hexdigest()[:32])


def _gpus() -> list[str]:
    """The GPUs of this machine, which decide the devices of a recipe without a cluster."""
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    return [*devices, os.environ.get("CUDA_VISIBLE_DEVICES", "")]
