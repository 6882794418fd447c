"""Reading checkpoints: verified, in any block, whatever mesh wrote them. See `checkpoint` for the format."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tpshard.recipes.diagnostic import Exit, Mistakes
from tpshard.train.checkpoint import FORMAT, MANIFEST, VERSION, check_cover, manifest_sum, steps
from tpshard.train.shards import sha256_of

logger = logging.getLogger(__name__)


class Damaged(Exception):
    """A checkpoint is not what its manifest says. The message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Saved:
    """What a checkpoint knows of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """(file, starts, sizes)"""


class SavedCheckpoint:
    """One checkpoint, opened: its manifest checked against itself; the files are read on demand.

    Raises:
        Damaged: the manifest is missing, unreadable, edited, or of a later version.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        manifest = _read_manifest(folder / MANIFEST)
        self.step: int = manifest["step"]
        self.world: int = manifest["world"]
        self.meta: dict[str, Any] = manifest["meta"]
        self.local: list[dict[str, Any]] = manifest["ranks"]
        """What each rank of the run that saved it gave as `local`."""
        self.files: dict[str, dict[str, Any]] = manifest["files"]
        self.tensors: dict[str, Saved] = {
            name: Saved(
                tuple(entry["shape"]),
                getattr(torch, entry["dtype"]),
                tuple((b["file"], tuple(b["starts"]), tuple(b["sizes"])) for b in entry["blocks"]),
            )
            for name, entry in manifest["tensors"].items()
        }
        self._open: dict[str, Any] = {}

    def verify(self) -> None:
        """Read every file and compare its sha256.

        Raises:
            Damaged: naming the first file that is missing, cut short or changed.
        """
        with ThreadPoolExecutor(8) as readers:  # hashing leaves the interpreter free
            for damage in readers.map(self._damage, self.files):
                if damage:
                    raise Damaged(damage)

    def _damage(self, name: str) -> str:
        """What is wrong with a file; "" where nothing is."""
        path, file = self.folder / name, self.files[name]
        try:
            size = path.stat().st_size
            if size != file["bytes"]:
                return f"{path} has {size} bytes, not {file['bytes']}"
            if sha256_of(path) != file["sha256"]:
                return f"{path} has changed since it was written (its sha256 is another)"
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read: {error}"
        return ""

    def block(self, name: str, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """global[starts : starts + sizes] of a tensor, on the CPU, put together from whatever blocks were written.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the block lies outside of it.
            Damaged: a file cannot be read.
        """
        saved = self.tensors[name]
        if len(starts) != len(saved.shape) or len(sizes) != len(saved.shape):
            raise ValueError(f"{name} has shape {saved.shape}; a block of {len(starts)} dims was asked for")
        if any(a < 0 or n < 0 or a + n > whole for a, n, whole in zip(starts, sizes, saved.shape)):
            raise ValueError(f"block {tuple(starts)} + {tuple(sizes)} lies outside of {name}, shape {saved.shape}")
        result = torch.empty(tuple(sizes), dtype=saved.dtype)
        for file, at, extent in saved.blocks:
            low = [max(a, b) for a, b in zip(starts, at)]
            high = [min(a + n, b + m) for a, n, b, m in zip(starts, sizes, at, extent)]
            if all(a < b for a, b in zip(low, high)):
                inside = tuple(slice(a - b, c - b) for a, b, c in zip(low, at, high))
                target = tuple(slice(a - b, c - b) for a, b, c in zip(low, starts, high))
                result[target] = self._read(file, name, inside)
        return result

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        saved = self.tensors[name]
        return self.block(name, (0,) * len(saved.shape), saved.shape)

    def differences(self, expected: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> list[str]:
        """What keeps this checkpoint from being loaded into tensors of these shapes and dtypes, in words."""
        found = []
        for what, names in (
            ("not in the checkpoint", [n for n in expected if n not in self.tensors]),
            ("in the checkpoint only", [n for n in self.tensors if n not in expected]),
        ):
            if names:
                found.append(f"{what}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if names[3:] else ""))
        for name, (shape, dtype) in expected.items():
            if saved := self.tensors.get(name):
                if saved.shape != tuple(shape):
                    found.append(f"{name}: saved {list(saved.shape)}, wanted {list(shape)}")
                elif saved.dtype != dtype:
                    found.append(f"{name}: saved {_short(saved.dtype)}, wanted {_short(dtype)}")
        return found

    def require(self, expected: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> None:
        """Refuse to load a checkpoint of another model.

        Raises:
            Mistakes: exit 7, with the differences.
        """
        if found := self.differences(expected):
            more = f"; and {len(found) - 6} more" if found[6:] else ""
            raise Mistakes.one(
                f"{self.folder} is of another model",
                exit=Exit.CHECKPOINT,
                why="; ".join(found[:6]) + more,
                fix="the recipe it was saved with (recipe.yaml of that run); or checkpoint.resume: never",
            )

    def _read(self, file: str, name: str, inside: tuple[slice, ...]) -> torch.Tensor:
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            return self._open[file].get_slice(name)[inside] if inside else self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise Damaged(f"{self.folder / file} cannot be read: {error}") from error


def newest(
    directory: Path, *, usable: Callable[[SavedCheckpoint], None] = SavedCheckpoint.verify
) -> SavedCheckpoint | None:
    """The newest checkpoint that is whole; a damaged one is named in a warning and the one before it is taken.

    Reads all of it: let one process choose, and tell the others which step.

    Args:
        directory: a run's `checkpoints`.
        usable: raises Damaged for those to pass over.

    Returns:
        None where there is no checkpoint at all.

    Raises:
        Mistakes: exit 7; there are checkpoints and all are damaged.
    """
    refused = []
    for path in reversed(steps(directory).values()):
        try:
            checkpoint = SavedCheckpoint(path)
            usable(checkpoint)
        except Damaged as error:
            refused.append(str(error))
            logger.warning("checkpoint %s is damaged: %s", path.name, error)
            continue
        if refused:
            logger.warning("falling back to %s", path.name)
        return checkpoint
    if refused:
        raise Mistakes.one(
            f"every checkpoint in {directory} is damaged",
            exit=Exit.CHECKPOINT,
            why="; ".join(refused),
            fix="restore one from a copy, or start anew with checkpoint.resume: never",
        )
    return None


def open_checkpoint(folder: Path) -> SavedCheckpoint:
    """One certain checkpoint, verified.

    Raises:
        Mistakes: exit 7; it is not there or damaged.
    """
    try:
        checkpoint = SavedCheckpoint(folder)
        checkpoint.verify()
    except Damaged as error:
        raise Mistakes.one(
            f"{folder} cannot be loaded",
            exit=Exit.CHECKPOINT,
            why=str(error),
            fix="another step of the same run, or a copy of this one",
        ) from error
    return checkpoint


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Damaged(f"{path} is not a manifest of a checkpoint")
    if manifest.get("version") != VERSION:
        raise Damaged(f"{path} is of version {manifest.get('version')}; this program reads version {VERSION}")
    if manifest.get("sha256") != manifest_sum(manifest):
        raise Damaged(f"{path} has been edited or damaged (its own sha256 is another)")
    try:
        for name in manifest["files"]:
            if Path(name).name != name or name.startswith("."):
                raise Damaged(f"{path} names {name!r}, which is not a file of its folder")
        for name, entry in manifest["tensors"].items():
            check_cover(name, entry["shape"], [(b["starts"], b["sizes"]) for b in entry["blocks"]])
            if unknown := {b["file"] for b in entry["blocks"]} - manifest["files"].keys():
                raise Damaged(f"{path}: {name} lies in {min(unknown)}, which it does not list")
            if not isinstance(getattr(torch, entry["dtype"], None), torch.dtype):
                raise Damaged(f"{path}: {name} has the unknown dtype {entry['dtype']}")
        for key in ("step", "world", "meta", "ranks"):
            manifest[key]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{path} is not laid out as a manifest: {type(error).__name__}: {error}") from error
    return manifest


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
