"""Sums of text files, computed as they are read: a change between two readings is noticed, in a file's middle too."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

BLOCK = 1 << 16
"""Bytes that are read at once; a resumed run reads in the same blocks as the one before it."""

Sum = tuple[int, str]
"""The number of a file's first bytes, and their sha256."""


class ShardSums:
    """For each file the sum of its first bytes, as far as they were read; compared when they are read again."""

    def __init__(self) -> None:
        self._known: dict[str, Sum] = {}
        self._reading: dict[str, _SummedReader] = {}

    def state(self) -> dict[str, list[Any]]:
        """The sums as JSON."""
        now = {name: reader.sum for name, reader in self._reading.items()}
        return {name: list(one) for name, one in merge_sums([self._known, now]).items()}

    def load(self, state: Mapping[str, Sequence[Any]]) -> None:
        """Takes the sums of an earlier run, against which files are compared from now on."""
        self._known = {**self._known, **{name: (int(size), str(digest)) for name, (size, digest) in state.items()}}
        self._reading = {}

    def forget(self) -> None:
        """Accepts all files as they are."""
        self._known, self._reading = {}, {}

    def differing(self, state: Mapping[str, Sequence[Any]]) -> list[str]:
        """The files that were read as far as in `state`, with another sum."""
        mine = self.state()
        return sorted(
            name
            for name, (size, digest) in state.items()
            if name in mine and mine[name][0] == size and mine[name][1] != digest
        )

    def read(self, name: str, file: BinaryIO, changed: Callable[[], Exception]) -> BinaryIO:
        """The file's bytes, summed while they are read from the start. Raises `changed()` at the end of those that were
        read before, if they have another sum."""
        if name in self._reading:
            self._known = merge_sums([self._known, {name: self._reading[name].sum}])
        reader = self._reading[name] = _SummedReader(file, self._known.get(name), changed)
        return cast(BinaryIO, io.BufferedReader(reader, BLOCK))

    def check(self, name: str, path: Path, changed: Callable[[], Exception]) -> None:
        """The same for a file that is not read from start to end: sums it as a whole."""
        with path.open("rb") as file:
            one = file.seek(0, io.SEEK_END), ""
            file.seek(0)
            one = one[0], hashlib.file_digest(file, "sha256").hexdigest()
        if self._known.setdefault(name, one) != one:
            raise changed()


def merge_sums(sums: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, Sum]:
    """For each file the sum that reaches furthest."""
    merged: dict[str, Sum] = {}
    for some in sums:
        for name, (size, digest) in some.items():
            if name not in merged or size > merged[name][0]:
                merged[name] = (int(size), str(digest))
    return merged


class _SummedReader(io.RawIOBase):
    """A file that is summed while it is read, and compared with an earlier sum where that ends."""

    def __init__(self, file: BinaryIO, earlier: Sum | None, changed: Callable[[], Exception]):
        super().__init__()
        self._file, self._earlier, self._changed = file, earlier, changed
        self._digest, self._at = hashlib.sha256(), 0

    @property
    def sum(self) -> Sum:
        return self._at, self._digest.hexdigest()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        if self._earlier is not None and (not data or self._at + len(data) >= self._earlier[0]):
            end, digest = self._earlier
            self._earlier = None
            self._digest.update(data[: end - self._at])
            if self._at + len(data) < end or self._digest.hexdigest() != digest:
                raise self._changed()
            self._digest.update(data[end - self._at :])
        else:
            self._digest.update(data)
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()
