"""Reading checkpoints: verified, in any block, on any mesh. See `checkpoint` for the format."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.files.file_lock import is_at, try_lock
from tpshard.files.folder_json import read_regular
from tpshard.kernels.dtypes import dtype_name
from tpshard.train.checkpoints.checkpoint import FORMAT, OPTIMIZER, VERSION, check_cover, manifest_sum, step_name, steps
from tpshard.train.checkpoints.checkpoint_drafts import MANIFEST
from tpshard.train.checkpoints.shards import StoredTensors
from tpshard.train.checkpoints.store_path import Location, StoreError, StorePath
from tpshard.train.checkpoints.verify import ALONE, Read, Together, first_damage, sha256_of

logger = logging.getLogger(__name__)


class Damaged(Exception):
    """A checkpoint contradicts its manifest. The message names the file and the fault."""


@dataclass(frozen=True)
class Saved:
    """A tensor of a checkpoint: shape, dtype, and the blocks that hold it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """(file, starts, sizes) of each block."""


class SavedCheckpoint:
    """An open checkpoint: the manifest is verified, the files are read on demand.

    In a folder its run does not remove it while this object exists. In a store the ranges that are asked for are read.

    Raises:
        Damaged: the manifest is missing, unreadable, changed, or of a later version.
    """

    def __init__(self, folder: Location):
        self.folder = folder
        self._kept = _keep(folder / MANIFEST) if isinstance(folder, Path) else None
        manifest = _read_manifest(folder / MANIFEST)
        self.step: int = manifest["step"]
        self.meta: dict[str, Any] = manifest["meta"]
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

    def first_damage(self, ranks: Together = ALONE) -> str:
        """Reads every file, compares its sha256, and names the first that is missing, truncated or changed; "" if none
        is. In a store, a file whose tag is that of the upload is not read. Of several `ranks` each must call it.
        """
        return first_damage({name: file["bytes"] for name, file in self.files.items()}, self._damage, ranks)

    def _damage(self, name: str, read: Read) -> str:
        """The fault of a file; "" if it has none. `read` is called with the bytes of each part that was read."""
        path, file = self.folder / name, self.files[name]
        try:
            if isinstance(path, StorePath):
                stored = path.stat()
                size, same = stored.size, stored.tag != "" and stored.tag == file.get("tag")
            else:
                size, same = path.stat().st_size, False
            if size != file["bytes"]:
                return f"{path} has {size} bytes, not {file['bytes']}"
            if not same and sha256_of(path, read) != file["sha256"]:
                return f"{path} has changed since it was written (its sha256 differs)"
        except FileNotFoundError:
            return f"{path} is missing"
        except StoreError:
            raise  # says nothing of the checkpoint
        except OSError as error:
            return f"{path} cannot be read: {error}"
        return ""

    def block(self, name: str, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """global[starts : starts + sizes] of a tensor, on the CPU, assembled from the stored blocks.

        Raises:
            KeyError: the checkpoint has no such tensor.
            ValueError: the block is outside the tensor.
            Damaged: a file cannot be read.
        """
        saved = self.tensors[name]
        if len(starts) != len(saved.shape) or len(sizes) != len(saved.shape):
            raise ValueError(f"{name} has shape {saved.shape}; a block of {len(starts)} dims was requested")
        if any(a < 0 or n < 0 or a + n > whole for a, n, whole in zip(starts, sizes, saved.shape)):
            raise ValueError(f"block {tuple(starts)} + {tuple(sizes)} is outside of {name}, shape {saved.shape}")
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

    def holds(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether the checkpoint has this tensor."""
        saved = self.tensors.get(name)
        return saved is not None and (saved.shape, saved.dtype) == (tuple(shape), dtype)

    def differences(
        self, expected: Mapping[str, tuple[Sequence[int], torch.dtype]], *, dtypes: bool = True, moments: bool = True
    ) -> list[str]:
        """Why this checkpoint cannot be loaded into tensors of these shapes and dtypes, as messages; empty if it
        can. dtypes: whether they must agree. moments: whether the checkpoint may have no others."""
        reasons = []
        known = [name for name in self.tensors if moments or not name.startswith(OPTIMIZER)]
        for change, names in (
            ("not in the checkpoint", [n for n in expected if n not in self.tensors]),
            ("in the checkpoint only", [n for n in known if n not in expected]),
        ):
            if names:
                reasons.append(
                    f"{change}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if names[3:] else "")
                )
        for name, (shape, dtype) in expected.items():
            if saved := self.tensors.get(name):
                if saved.shape != tuple(shape):
                    reasons.append(f"{name}: saved {list(saved.shape)}, expected {list(shape)}")
                elif dtypes and saved.dtype != dtype:
                    reasons.append(f"{name}: saved {dtype_name(saved.dtype)}, expected {dtype_name(dtype)}")
        return reasons

    def require(
        self, expected: Mapping[str, tuple[Sequence[int], torch.dtype]], *, dtypes: bool = True, moments: bool = True
    ) -> None:
        """Raises if the checkpoint is of another model. See `differences`.

        Raises:
            Mistakes: exit 7, with the differences.
        """
        if reasons := self.differences(expected, dtypes=dtypes, moments=moments):
            more = f"; and {len(reasons) - 6} more" if reasons[6:] else ""
            raise Mistakes.one(
                f"{self.folder} is a checkpoint of another model",
                exit=Exit.CHECKPOINT,
                why="; ".join(reasons[:6]) + more,
                fix="use the recipe it was saved with (recipe.yaml of that run), or another run.dir",
            )

    def _read(self, file: str, name: str, inside: tuple[slice, ...]) -> torch.Tensor:
        path = self.folder / file
        try:
            if isinstance(path, StorePath):
                if file not in self._open:
                    self._open[file] = StoredTensors(path)
                values: torch.Tensor = self._open[file].slice(name, inside)
                return values
            if file not in self._open:
                self._open[file] = safe_open(path, framework="pt")
            return self._open[file].get_slice(name)[inside] if inside else self._open[file].get_tensor(name)
        except StoreError:
            raise
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise Damaged(f"{self.folder / file} cannot be read: {error}") from error


def newest(directory: Location, ranks: Together = ALONE) -> SavedCheckpoint | None:
    """The newest undamaged checkpoint. Damaged ones are named in a warning and passed over.

    Reads the whole checkpoint: of several `ranks` each must call it and reads a share of the files, and what one of
    them reads is progress to the watchdogs of all.

    Args:
        directory: a run's `checkpoints`.

    Returns:
        None where there is no checkpoint.

    Raises:
        Mistakes: exit 7; all checkpoints are damaged.
    """
    refused: list[str] = []
    names = [path.name for path in reversed(steps(directory).values())] if ranks.rank == 0 else []
    for name in ranks.from_first(names):
        checkpoint, damage = _open(directory / name)
        if not (damage := next(filter(None, ranks.gather(damage)), "")):
            assert checkpoint is not None
            damage = checkpoint.first_damage(ranks)
        if not damage:
            if refused and ranks.rank == 0:
                logger.warning("falling back to %s", name)
            return checkpoint
        refused.append(damage)
        if ranks.rank == 0:
            logger.warning("checkpoint %s is damaged: %s", name, damage)
    if refused:
        raise Mistakes.one(
            f"every checkpoint in {directory} is damaged",
            exit=Exit.CHECKPOINT,
            why="; ".join(refused),
            fix="restore one from a copy, or start over with checkpoint.resume: never",
        )
    return None


def _open(path: Location) -> tuple[SavedCheckpoint | None, str]:
    """The checkpoint in a folder that is named by its step, or why it cannot be opened."""
    try:
        checkpoint = SavedCheckpoint(path)
    except Damaged as error:
        return None, str(error)
    if path.name != step_name(checkpoint.step):
        return None, f"{path} holds step {checkpoint.step}: it was renamed from {step_name(checkpoint.step)}"
    return checkpoint, ""


def open_checkpoint(folder: Location, ranks: Together = ALONE) -> SavedCheckpoint:
    """The checkpoint in `folder`, verified, of several `ranks` by all of them.

    Raises:
        Mistakes: exit 7; it is missing or damaged.
    """
    try:
        checkpoint = SavedCheckpoint(folder)
        if damage := checkpoint.first_damage(ranks):
            raise Damaged(damage)
    except Damaged as error:
        raise Mistakes.one(
            f"{folder} cannot be loaded",
            exit=Exit.CHECKPOINT,
            why=str(error),
            fix="another step of the same run, or a copy of this one",
        ) from error
    return checkpoint


def _keep(path: Path) -> BinaryIO:
    """Opens the manifest with a shared lock, which keeps its checkpoint from being removed (see `checkpoint.prune`)."""
    try:
        file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: SIM115 (open as long as the checkpoint)
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    free = True
    with contextlib.suppress(OSError):  # a disk without locks
        free = try_lock(file.fileno(), shared=True)
    if not free or not is_at(file.fileno(), path):
        file.close()
        raise Damaged(f"{path} was removed by its run")
    return file


def _read_manifest(path: Location) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes() if isinstance(path, StorePath) else read_regular(path))
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error
    except StoreError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Damaged(f"{path} is not the manifest of a checkpoint")
    if manifest.get("version") != VERSION:
        raise Damaged(f"{path} is of version {manifest.get('version')}; this program reads version {VERSION}")
    if manifest.get("sha256") != manifest_sum(manifest):
        raise Damaged(f"{path} was changed or damaged (its own sha256 differs)")
    try:
        for name in manifest["files"]:
            if Path(name).name != name or name.startswith("."):
                raise Damaged(f"{path} names {name!r}, which is not a file of its folder")
        for name, entry in manifest["tensors"].items():
            check_cover(name, entry["shape"], [(b["starts"], b["sizes"]) for b in entry["blocks"]])
            if unknown := {b["file"] for b in entry["blocks"]} - manifest["files"].keys():
                raise Damaged(f"{path}: {name} is in {min(unknown)}, which it does not list")
            if not isinstance(getattr(torch, entry["dtype"], None), torch.dtype):
                raise Damaged(f"{path}: {name} has the unknown dtype {entry['dtype']}")
        if type(manifest["step"]) is not int or not isinstance(manifest["meta"], dict):
            raise Damaged(f"{path}: `step` and `meta` are not a number and a map")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{path} does not have the layout of a manifest: {type(error).__name__}: {error}") from error
    return manifest
