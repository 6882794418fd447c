"""A model of PyTorch's caching allocator on GPUs: how much memory it reserves for a sequence of allocations.

What it does and its constants are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13). Requests are rounded
to 512 bytes; those of up to 1 MiB come from a pool of their own. The smallest free block that is large enough serves a
request, and its rest is free again if it is worth splitting; neighbours that are free are one block. A pool without
such a block grows: by a segment (2 MiB for small requests, 20 MiB for those below 10 MiB, else a multiple of 2 MiB),
which nothing joins with another, or, with expandable segments, by pages at the end of its one segment.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import count

_MIB = 2**20
_ROUND = 512
PAGE = 20 * _MIB
"""What an expandable segment of large requests grows by."""
_SMALL = _MIB
"""Requests up to this come from the pool of small ones."""


class _Block:
    """A part of a segment, in use or free, between its neighbours."""

    __slots__ = ("after", "before", "free", "key", "size", "small")

    def __init__(self, key: int, size: int, small: bool, before: _Block | None, after: _Block | None):
        self.key, self.size, self.small = key, size, small
        self.before, self.after, self.free = before, after, True


class CachingAllocator:
    """Allocates and frees by the rules of torch's allocator, and counts what it reserves of a device.

    capacity: bytes that it may reserve; beyond them it gives back what is free before it takes more. None: no bound.
    """

    def __init__(self, *, expandable: bool, capacity: int | None = None):
        self.expandable, self.capacity = expandable, capacity
        self.allocated = self.reserved = self.most_reserved = 0
        self._keys = count()
        self._used: dict[int, _Block] = {}
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[int, _Block] = {}
        """Free blocks by key, which `_free` has with their sizes, the smallest first."""
        self._last: dict[bool, _Block | None] = {True: None, False: None}
        """The last block of each pool's expandable segment."""

    def malloc(self, size: int) -> int:
        """Allocates `size` bytes, and returns what `free` takes."""
        size = max(_ROUND, -(-size // _ROUND) * _ROUND)
        small = size <= _SMALL
        pool = self._free[small]
        at = bisect_left(pool, (size, -1))
        block = self._removed(*pool[at]) if at < len(pool) else self._grown(size, small)
        rest = block.size - size
        if rest >= _ROUND if small or self.expandable else rest > _SMALL:
            block.size = size
            self._put(_Block(next(self._keys), rest, small, block, block.after))
        block.free = False
        self._used[block.key] = block
        self.allocated += block.size
        if self.allocated > self.reserved:  # pages that were given back
            self._reserve(self.allocated - self.reserved, 0)
        return block.key

    def free(self, key: int) -> None:
        """Frees what `malloc` returned."""
        block = self._used.pop(key)
        self.allocated -= block.size
        if block.after is not None and block.after.free:
            self._join(block, self._removed(block.after.size, block.after.key))
        if block.before is not None and block.before.free:
            before = self._removed(block.before.size, block.before.key)
            self._join(before, block)
            block = before
        block.free = True
        insort(self._free[block.small], (block.size, block.key))
        self._blocks[block.key] = block

    def _join(self, block: _Block, after: _Block) -> None:
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        elif self.expandable:
            self._last[block.small] = block

    def _removed(self, size: int, key: int) -> _Block:
        """A free block, which is no longer in its pool."""
        block = self._blocks.pop(key)
        pool = self._free[block.small]
        del pool[bisect_left(pool, (size, key))]
        return block

    def _put(self, block: _Block) -> None:
        """Adds a free block between the neighbours that it names."""
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        elif self.expandable:
            self._last[block.small] = block
        insort(self._free[block.small], (block.size, block.key))
        self._blocks[block.key] = block

    def _grown(self, size: int, small: bool) -> _Block:
        """A block of new memory that is in no pool."""
        if not self.expandable:
            large = 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
            added = 2 * _MIB if small else large
            self._reserve(added, size)
            return _Block(next(self._keys), added, small, None, None)
        page, last = 2 * _MIB if small else PAGE, self._last[small]
        own = last.size if last is not None and last.free else 0
        added = -(-(size - own) // page) * page
        self._reserve(added, size)
        if own and last is not None:
            self._removed(own, last.key)
            last.size += added
            return last
        block = _Block(next(self._keys), added, small, last, None)
        if last is not None:
            last.after = block
        self._last[small] = block
        return block

    def _reserve(self, added: int, size: int) -> None:
        if self.capacity is not None and self.reserved + added > self.capacity:
            self._give_back(added, size)
        self.reserved += added
        self.most_reserved = max(self.most_reserved, self.reserved)

    def _give_back(self, added: int, size: int) -> None:
        """Gives free memory back: pages of an expandable segment, of others only those of which nothing is in use."""
        if self.expandable:  # its addresses stay, and take memory again where they are used
            self.reserved = min(self.reserved, max(self.allocated + size, self.capacity or 0) - added)
            return
        for block in [b for b in self._blocks.values() if b.before is None and b.after is None]:
            self._removed(block.size, block.key)
            self.reserved -= block.size
