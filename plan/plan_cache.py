"""Plans that were made before, found by content: an unchanged recipe is not planned again.

An entry is a folder in `$TPSHARD_CACHE`, else in `$XDG_CACHE_HOME/tpshard/plans` or `~/.cache/tpshard/plans`, and holds
what a plan wrote. All of it may be deleted at any time. Its name is a hash of all that a plan depends on: the recipe
and where its values are written, the device file, the model's configuration, tpshard's own code, torch and Python. A
recipe with code of the user's (`model.module`, `model.transformers`, a task of one's own) has no entry: what such code
reads is not known. Imports no torch.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tpshard.plan import save
from tpshard.recipes.diagnostic import Mistakes
from tpshard.recipes.schema import Recipe

MOST = 64
"""Entries that are kept, the newest."""


@dataclass(frozen=True)
class PlanEntry:
    """What one plan wrote, by kind; nothing where it was not made before."""

    folder: Path

    def read(self, kinds: Iterable[str]) -> dict[str, str] | None:
        """The texts of these kinds; None where one is not there."""
        try:
            found = {kind: gzip.decompress((self.folder / f"{kind}.gz").read_bytes()).decode() for kind in kinds}
            os.utime(self.folder)
        except (OSError, EOFError, zlib.error, UnicodeDecodeError):
            return None
        return found

    def write(self, texts: dict[str, str]) -> None:
        """Keeps these texts, each at once or not at all. A folder that cannot be written is no mistake."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            for kind, text in texts.items():
                aside = self.folder / f".{kind}.{os.getpid()}"
                aside.write_bytes(gzip.compress(text.encode(), 1, mtime=0))
                os.replace(aside, self.folder / f"{kind}.gz")
            entries = sorted(self.folder.parent.iterdir(), key=lambda entry: entry.stat().st_mtime)
            for old in entries[:-MOST]:
                shutil.rmtree(old, ignore_errors=True)


def place() -> Path:
    """The folder of all entries."""
    if own := os.environ.get("TPSHARD_CACHE"):
        return Path(own)
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "tpshard", "plans")


def entry_of(recipe: Recipe, *asked: object) -> PlanEntry | None:
    """The entry of a recipe's plan; `asked` is whatever else decides what it says. None where no hash can know all."""
    model = recipe.model
    if model.module is not None or model.transformers is not None or ":" in recipe.task:
        return None
    try:
        made_with = json.dumps(save.versions(recipe), sort_keys=True)
        parts = [recipe.to_yaml(resolved=True), recipe.file, repr(recipe._places), repr(asked), made_with]
    except (Mistakes, OSError):
        return None  # whoever plans says what is wrong
    key = hashlib.sha256()
    for part in (*parts, save.code_of(["plan"]), *_gpus()):
        key.update(hashlib.sha256(part.encode()).digest())
    return PlanEntry(place() / key.hexdigest()[:32])


def _gpus() -> list[str]:
    """Those that are here: a recipe without a cluster takes as many."""
    found = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    return [*found, os.environ.get("CUDA_VISIBLE_DEVICES", "")]
