"""Writing checkpoints, to a folder or to an object store. `restore` reads them on any mesh.

    checkpoints/step-000500/manifest.json            the layout, the sha256 of every file, the caller's JSON
    checkpoints/step-000500/rank-00003.safetensors   the blocks that rank 3 wrote

Every rank writes its own blocks; a block that several ranks hold is written by one of them. The manifest makes a
checkpoint exist and comes last, so that what a killed run leaves is never mistaken for one (see `checkpoint_drafts`).
Needs a folder that all ranks share, or a store, and a way to gather JSON, but no process group. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import math
import re
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpshard.kernels.dtypes import dtype_name
from tpshard.train.checkpoints.checkpoint_drafts import (
    MANIFEST,
    Draft,
    FolderDraft,
    StoreDraft,
    move_aside,
    remove_leftovers,
)
from tpshard.train.checkpoints.checkpoint_drafts import remove as remove_checkpoint
from tpshard.train.checkpoints.shards import Shard, write_safetensors
from tpshard.train.checkpoints.store_path import Location, StorePath

logger = logging.getLogger(__name__)

FORMAT = "tpshard-checkpoint"
VERSION = 1
OPTIMIZER = "optimizer/"
"""Prefix of the optimizer's tensors, such as `optimizer/exp_avg/layers.0.mlp.up.weight`; others are the model's."""

Gather = Callable[[Any], list[Any]]
"""Takes this rank's value (JSON) and returns those of all ranks, in their order."""


class SaveFailed(OSError):
    """A checkpoint could not be written; earlier ones are untouched. Raised on every rank."""


def save(
    directory: Location,
    step: int,
    tensors: Mapping[str, Shard],
    meta: Mapping[str, Any],
    *,
    rank: int = 0,
    world: int = 1,
    gather: Gather = lambda value: [value],
    keep_last: int = 0,
    guard: Callable[[], None] = lambda: None,
) -> Location:
    """Writes the checkpoint `directory`/step-NNNNNN. Every rank calls it, with the same step.

    Args:
        directory: the run's `checkpoints`.
        tensors: this rank's blocks, by the global tensor's name.
        meta: JSON, the same on every rank (rank 0's is written).
        keep_last: the number of checkpoints kept, this one included; 0 keeps all.
        guard: called on rank 0 before the checkpoint appears; raises OSError if it must not.

    Returns:
        The checkpoint.

    Raises:
        SaveFailed: on every rank, if any could not write (disk full, read-only, quota, a store that fails).
        ValueError: the blocks of all ranks do not cover a tensor, or contradict each other.
    """
    final = directory / step_name(step)
    attempt = str(gather(uuid.uuid4().hex)[0])
    draft: Draft = StoreDraft(final, attempt) if isinstance(final, StorePath) else FolderDraft(final)
    blocks: list[Any] = []
    parts: list[Any] = []

    def begin() -> dict[str, list[Any]]:
        if rank == 0:
            draft.begin()
        return {name: block_of(shard) for name, shard in tensors.items()}

    def write_part() -> dict[str, Any] | None:
        return _write_part(draft, rank, tensors, blocks)

    def finish() -> None:
        if rank == 0:
            manifest = _manifest(blocks, parts, step, world, attempt, dict(meta))
            guard()
            draft.finish(manifest["files"], json.dumps(manifest, allow_nan=False).encode())

    def together(phase: Callable[[], Any]) -> list[Any]:
        """Runs a phase on every rank, and returns the results of all."""
        mine, problem = None, None
        try:
            mine = phase()
        except Exception as error:  # kept, so that a failing rank still reaches the others
            problem = error
        everyone = gather([mine, None if problem is None else f"{problem}" or type(problem).__name__])
        why = next((why for _, why in everyone if why is not None), None)
        if why is None:
            return [result for result, _ in everyone]
        if rank == 0:
            draft.abandon()
        if problem is not None and not isinstance(problem, OSError):
            raise problem
        raise SaveFailed(f"the checkpoint of step {step} was not written: {why}") from problem

    blocks = together(begin)
    parts = together(write_part)
    together(finish)
    if rank == 0:
        prune(directory, step, keep_last)
    return final


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def steps(directory: Location) -> dict[int, Location]:
    """The checkpoints of a folder by step, oldest first; not verified. Raises OSError where a store fails."""
    folders: dict[int, Location] = {}
    if isinstance(directory, StorePath):
        for name in directory.files():
            if match := re.fullmatch(rf"(step-(\d{{6,}}))/{MANIFEST}", name):
                folders[int(match.group(2))] = directory / match.group(1)
        return dict(sorted(folders.items()))
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if (match := re.fullmatch(r"step-(\d{6,})", path.name)) and path.is_dir():
                folders[int(match.group(1))] = path
    return dict(sorted(folders.items()))


def clean(directory: Location) -> None:
    """Removes or completes what a killed save left unfinished. Called at the start of a run, by the process that holds
    its lock.
    """
    with contextlib.suppress(OSError):
        remove_leftovers(directory)


def prune(directory: Location, step: int, keep_last: int) -> None:
    """Removes checkpoints older than the last `keep_last` up to `step`, which must exist already.

    In a folder, one that a process reads, such as a server or a conversion, stays until a later save.

    Later checkpoints belong to an abandoned part of the run (before a rollback, or before a new start in an old
    folder). They are kept under another name, so that nothing resumes from them.
    """
    with contextlib.suppress(OSError):
        checkpoints = steps(directory)
        older = [path for number, path in checkpoints.items() if number <= step]
        for path in older[:-keep_last] if keep_last else []:
            remove_checkpoint(path)
        for number, path in checkpoints.items():
            if number > step:
                logger.warning("%s is of an abandoned part of this run: %s", path.name, move_aside(path))


def block_of(shard: Shard) -> list[Any]:
    """dtype, global shape, starts and sizes of a block, as JSON values."""
    return [dtype_name(shard.tensor.dtype), shard.shape, shard.starts, tuple(shard.tensor.shape)]


def owned(mine: Mapping[str, str], everyone: Sequence[Mapping[str, str]], rank: int) -> list[str]:
    """The names of the blocks in `mine` that `rank` writes; values describe blocks. A block that several ranks hold is
    written by the one that the hash of its name chooses, so that replicated tensors are spread over their holders."""
    holders: dict[tuple[str, str], list[int]] = {}
    for other, blocks in enumerate(everyone):
        for pair in blocks.items():
            holders.setdefault(pair, []).append(other)
    pairs = [(name, holders[name, block]) for name, block in mine.items()]
    return [name for name, among in pairs if among[zlib.crc32(name.encode()) % len(among)] == rank]


def _write_part(
    draft: Draft, rank: int, tensors: Mapping[str, Shard], blocks: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Writes this rank's file: the blocks that only it holds, and its share of those that several ranks hold.

    Returns its entry in the manifest, and the blocks in it; None where there is nothing to write.
    """
    everyone = [{name: json.dumps(block) for name, block in of_rank.items()} for of_rank in blocks]
    own_shards = {name: tensors[name] for name in owned(everyone[rank], everyone, rank) if tensors[name].tensor.numel()}
    if not own_shards:
        return None
    place = draft.part(rank)
    size, digest = write_safetensors(place, {name: shard.tensor for name, shard in own_shards.items()})
    file = {"bytes": size, "sha256": digest}
    if isinstance(place, StorePath):
        file["tag"] = place.stat().tag
    return {"name": place.name, "file": file, "blocks": {name: block_of(shard) for name, shard in own_shards.items()}}


def _manifest(
    blocks: Sequence[Mapping[str, Any]], parts: Sequence[Any], step: int, world: int, attempt: str,
    meta: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The manifest of a checkpoint, from what every rank holds and what it wrote."""
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for rank, of_rank in enumerate(blocks):
        for name, (dtype, shape, *_) in of_rank.items():
            entry = tensors.setdefault(name, {"dtype": dtype, "shape": shape, "blocks": []})
            if [entry["dtype"], list(entry["shape"])] != [dtype, list(shape)]:
                raise ValueError(
                    f"{name} is {dtype} {shape} on rank {rank}, and {entry['dtype']} {entry['shape']} below"
                )
    for part in parts:
        if part is not None:
            files[part["name"]] = part["file"]
            for name, (_, _, starts, sizes) in part["blocks"].items():
                tensors[name]["blocks"].append({"file": part["name"], "starts": starts, "sizes": sizes})
    for name, entry in tensors.items():
        check_cover(name, entry["shape"], [(b["starts"], b["sizes"]) for b in entry["blocks"]])
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "attempt": attempt,
        "step": step,
        "world": world,
        "meta": meta,
        "files": files,
        "tensors": tensors,
    }
    return {**manifest, "sha256": manifest_sum(manifest)}


def manifest_sum(manifest: Mapping[str, Any]) -> str:
    """The sha256 of a manifest without its own sum."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_cover(name: str, shape: Sequence[int], blocks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Raises ValueError unless the blocks cover every element of the tensor exactly once."""
    held, whole = sum(math.prod(sizes) for _, sizes in blocks), math.prod(shape)
    if held != whole:
        raise ValueError(f"the blocks of {name} hold {held} of its {whole} elements")
    cuts = [sorted({starts[dim] for starts, _ in blocks} | {size}) for dim, size in enumerate(shape)]
    following = [dict(itertools.pairwise(cut)) for cut in cuts]
    cells = {
        tuple(starts)
        for starts, sizes in blocks
        if all(following[dim].get(start) == start + sizes[dim] for dim, start in enumerate(starts))
    }
    if len(cells) == len(blocks) == math.prod(len(cut) - 1 for cut in cuts):
        return  # a grid with each cell once, as a mesh produces
    for index, (starts, sizes) in enumerate(blocks):
        for others, extents in blocks[:index]:
            if all(max(a, b) < min(a + n, b + m) for a, n, b, m in zip(starts, sizes, others, extents)):
                raise ValueError(f"two different blocks of {name} overlap: at {starts} and at {others}")
        if any(start < 0 or start + size > end for start, size, end in zip(starts, sizes, shape)):
            raise ValueError(f"block {starts} + {sizes} lies outside of {name}, shape {shape}")
