"""Writing checkpoints: to a temporary folder with sha256 sums, then renamed. `restore` reads them on any mesh.

    checkpoints/step-000500/manifest.json            the layout, the sha256 of every file, the caller's JSON
    checkpoints/step-000500/rank-00003.safetensors   the blocks that rank 3 wrote

Every rank writes its own blocks; a block that several ranks hold is written by one of them. A folder is named step-*
only by the final rename, so that what a killed run leaves is never mistaken for a checkpoint. Needs a disk that all
ranks share and a barrier, but no process group. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import math
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpshard.files.atomic import sync, write_file
from tpshard.files.file_lock import unlocked
from tpshard.kernels.dtypes import dtype_name
from tpshard.train.checkpoints.shards import Shard, write_safetensors, write_synced

logger = logging.getLogger(__name__)

FORMAT = "tpshard-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
OPTIMIZER = "optimizer/"
"""Prefix of the optimizer's tensors, such as `optimizer/exp_avg/layers.0.mlp.up.weight`; others are the model's."""

Barrier = Callable[[], None]


class SaveFailed(OSError):
    """A checkpoint could not be written; earlier ones are untouched. Raised on every rank."""


def save(
    directory: Path,
    step: int,
    tensors: Mapping[str, Shard],
    meta: Mapping[str, Any],
    *,
    rank: int = 0,
    world: int = 1,
    barrier: Barrier = lambda: None,
    keep_last: int = 0,
) -> Path:
    """Writes the checkpoint `directory`/step-NNNNNN. Every rank calls it, with the same step.

    Args:
        directory: the run's `checkpoints` folder.
        tensors: this rank's blocks, by the global tensor's name.
        meta: JSON, the same on every rank (rank 0's is written).
        keep_last: the number of checkpoints kept, this one included; 0 keeps all.

    Returns:
        The folder.

    Raises:
        SaveFailed: on every rank, if any could not write (disk full, read-only, quota).
        ValueError: the blocks of all ranks do not cover a tensor, or contradict each other.
    """
    final = directory / step_name(step)
    work = directory / f".{final.name}.tmp"
    attempt = ""
    problem: Exception | None = None

    def begin() -> None:
        if rank == 0:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            write_synced(work / "attempt", [uuid.uuid4().hex.encode()])

    def list_blocks() -> None:
        nonlocal attempt
        attempt = (work / "attempt").read_text()
        _write_json(work / f"blocks-{rank:05d}.json", {name: block_of(shard) for name, shard in tensors.items()})

    def write_part() -> None:
        _write_part(work, rank, world, tensors)

    def finish() -> None:
        if rank == 0:
            _finish(work, final, step, world, attempt, dict(meta))

    for phase in (begin, list_blocks, write_part, finish):
        if problem is None:
            try:
                phase()
            except Exception as error:  # kept, so that a failing rank still reaches the barriers
                problem = error
        barrier()
    if rank == 0 and problem is not None:
        shutil.rmtree(work, ignore_errors=True)
    if problem is None and _attempt_of(final) == attempt:
        if rank == 0:
            prune(directory, step, keep_last)
        return final
    if problem is not None and not isinstance(problem, OSError):
        raise problem
    raise SaveFailed(f"the checkpoint of step {step} was not written: {problem or 'another rank could not write'}")


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def steps(directory: Path) -> dict[int, Path]:
    """The checkpoints of a folder by step, oldest first; not verified."""
    folders = {}
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if (match := re.fullmatch(r"step-(\d{6,})", path.name)) and path.is_dir():
                folders[int(match.group(1))] = path
    return dict(sorted(folders.items()))


def clean(directory: Path) -> None:
    """Removes or completes the folders that a killed save left unfinished. Called at the start of a run, by the process
    that holds its lock.
    """
    with contextlib.suppress(OSError):
        for path in sorted(directory.iterdir()):
            if match := re.fullmatch(r"\.(step-\d{6,})\.(tmp|deleted|replaced)", path.name):
                if match.group(2) == "replaced" and not (directory / match.group(1)).exists():
                    path.rename(directory / match.group(1))  # killed between the two renames of an overwrite
                else:
                    shutil.rmtree(path, ignore_errors=True)


def prune(directory: Path, step: int, keep_last: int) -> None:
    """Removes checkpoints older than the last `keep_last` up to `step`, which must exist already.

    One that a process reads, such as a server or a conversion, stays until a later save.

    Later checkpoints belong to an abandoned part of the run (before a rollback, or before a new start in an old
    folder). They are kept under another name, so that nothing resumes from them.
    """
    checkpoints = steps(directory)
    with contextlib.suppress(OSError):
        older = [path for number, path in checkpoints.items() if number <= step]
        for path in older[:-keep_last] if keep_last else []:
            doomed = directory / f".{path.name}.deleted"
            with unlocked(path / MANIFEST) as unread:
                if not unread:
                    continue
                path.rename(doomed)  # first: half a checkpoint must not look like a whole one
            shutil.rmtree(doomed, ignore_errors=True)
        for number, path in checkpoints.items():
            if number > step:
                aside = directory / f"superseded-{path.name}"
                while aside.exists():
                    aside = aside.with_name(aside.name + "-")
                path.rename(aside)
                logger.warning("%s is of an abandoned part of this run: renamed to %s", path.name, aside.name)


def block_of(shard: Shard) -> list[Any]:
    """dtype, global shape, starts and sizes of a block, as JSON values."""
    return [dtype_name(shard.tensor.dtype), shard.shape, shard.starts, tuple(shard.tensor.shape)]


def _write_json(path: Path, value: object) -> None:
    write_file(path, json.dumps(value, allow_nan=False))


def owned(mine: Mapping[str, str], everyone: Sequence[Mapping[str, str]], rank: int) -> list[str]:
    """The names of the blocks in `mine` that `rank` writes; values describe blocks. A block that several ranks hold is
    written by the one that the hash of its name chooses, so that replicated tensors are spread over their holders."""
    holders: dict[tuple[str, str], list[int]] = {}
    for other, blocks in enumerate(everyone):
        for pair in blocks.items():
            holders.setdefault(pair, []).append(other)
    pairs = [(name, holders[name, block]) for name, block in mine.items()]
    return [name for name, among in pairs if among[zlib.crc32(name.encode()) % len(among)] == rank]


def _write_part(work: Path, rank: int, world: int, tensors: Mapping[str, Shard]) -> None:
    """Writes this rank's file: the blocks that only it holds, and its share of those that several ranks hold."""
    mine = {name: json.dumps(block_of(shard)) for name, shard in tensors.items()}
    everyone = [
        {name: json.dumps(block) for name, block in _read_blocks(work, other).items()} for other in range(world)
    ]
    own_shards = {name: tensors[name] for name in owned(mine, everyone, rank) if tensors[name].tensor.numel()}
    file = f"rank-{rank:05d}.safetensors"
    part: dict[str, Any] = {"file": None, "blocks": {}}
    if own_shards:
        size, digest = write_safetensors(work / file, {name: shard.tensor for name, shard in own_shards.items()})
        part["file"] = {"name": file, "bytes": size, "sha256": digest}
        part["blocks"] = {name: block_of(shard) for name, shard in own_shards.items()}
    _write_json(work / f"part-{rank:05d}.json", part)


def _read_blocks(work: Path, rank: int) -> dict[str, list[Any]]:
    try:
        return json.loads((work / f"blocks-{rank:05d}.json").read_bytes())
    except FileNotFoundError as error:
        raise OSError(
            f"rank {rank} wrote no file: its disk failed, or run.dir is not on a disk that all hosts share"
        ) from error


def _finish(work: Path, final: Path, step: int, world: int, attempt: str, meta: dict[str, Any]) -> None:
    manifest = _manifest(work, step, world, attempt, meta)
    for path in work.iterdir():
        if path.suffix != ".safetensors":
            path.unlink()
    write_synced(work / MANIFEST, [json.dumps(manifest, allow_nan=False).encode()])
    sync(work)
    replaced = final.parent / f".{final.name}.replaced"
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    work.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _manifest(work: Path, step: int, world: int, attempt: str, meta: dict[str, Any]) -> dict[str, Any]:
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for rank in range(world):
        for name, (dtype, shape, *_) in _read_blocks(work, rank).items():
            entry = tensors.setdefault(name, {"dtype": dtype, "shape": shape, "blocks": []})
            if [entry["dtype"], entry["shape"]] != [dtype, shape]:
                raise ValueError(
                    f"{name} is {dtype} {shape} on rank {rank}, and {entry['dtype']} {entry['shape']} below"
                )
        path = work / f"part-{rank:05d}.json"
        if not path.exists():
            raise OSError(f"rank {rank} could not write its part")
        part = json.loads(path.read_bytes())
        if part["file"]:
            files[part["file"]["name"]] = {k: part["file"][k] for k in ("bytes", "sha256")}
            for name, (_, _, starts, sizes) in part["blocks"].items():
                tensors[name]["blocks"].append({"file": part["file"]["name"], "starts": starts, "sizes": sizes})
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


def _attempt_of(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / MANIFEST).read_bytes())["attempt"])
    except (OSError, ValueError, KeyError):
        return None
