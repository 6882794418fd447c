"""A checkpoint's files against their sums: each rank reads a share, and all of them wait for the slowest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

from tpshard.parallelism.runtime.context import Context
from tpshard.train.checkpoints.store_path import Location, StorePath

PART = 1 << 24
"""Bytes of a file that are read and counted at once."""
ROUND_S = 1.0
"""Seconds after which the ranks tell each other whether they have read more."""

Read = Callable[[int], None]
"""Is told the number of bytes of each part that was read; called by several threads."""


class Together(NamedTuple):
    """This rank's place among those that verify a checkpoint together, by default none but itself."""

    rank: int = 0
    world: int = 1
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    """Returns the values (JSON) of all ranks, in their order."""
    beat: Callable[[], None] = lambda: None
    """Tells this rank's watchdog of progress."""

    @staticmethod
    def of(context: Context) -> Together:
        """All ranks of a run."""
        return Together(context.rank, context.world, context.gather, context.watchdog.beat)

    def from_first(self, value: Any) -> Any:
        """Rank 0's value. Every rank must call it."""
        return self.gather(value)[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. Every rank must call it."""
        return any(self.gather(flag))


ALONE = Together()
"""A process that verifies by itself, which may be one of several workers."""


def sha256_of(path: Location, read: Read) -> str:
    """The sum of a file, which is read in parts. Raises OSError."""
    digest = hashlib.sha256()
    for part in path.parts() if isinstance(path, StorePath) else _parts(path):
        digest.update(part)
        read(len(part))
    return digest.hexdigest()


def first_damage(files: Mapping[str, int], damage: Callable[[str, Read], str], ranks: Together) -> str:
    """The fault of the first file that has one, the same on every rank; "" where none has. Every rank must call it.

    files: the bytes of each file. damage: a file's fault, "" if it has none. Where any rank has read more, the
    watchdogs of all take it for progress: one large file may take longer than they wait.
    """
    parts: list[int] = []  # appended to by all readers, which no two can do at once
    mine = shares(files, ranks.world)[ranks.rank]
    with ThreadPoolExecutor(8) as readers:  # hashing releases the interpreter's lock
        faults = {name: readers.submit(damage, name, parts.append) for name in mine}
        left, known = set(faults.values()), 0
        while ranks.any(bool(left)):
            left = wait(left, timeout=ROUND_S).not_done
            known, before = len(parts), known
            if ranks.any(known > before):
                ranks.beat()
    found: dict[str, str] = {}
    for some in ranks.gather({name: fault.result() for name, fault in faults.items()}):
        found.update(some)
    return next((found[name] for name in files if found[name]), "")


def shares(files: Mapping[str, int], ranks: int) -> list[list[str]]:
    """The files that each rank reads, in about equal bytes: the largest first, each to the rank with the fewest."""
    mine: list[list[str]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for name in sorted(files, key=lambda name: -files[name]):
        size, rank = heappop(loads)
        mine[rank].append(name)
        heappush(loads, (size + files[name], rank))
    return mine


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(PART):
            yield part
