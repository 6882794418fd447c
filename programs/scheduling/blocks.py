"""Block management of the paged cache: which sequences hold a block, and which computed blocks can be reused."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict, deque
from collections.abc import Sequence

Digest = bytes
ROOT: Digest = b""


def chain(parent: Digest, tokens: Sequence[int]) -> Digest:
    """The digest of a full block, from its tokens and its parent's digest.

    The hash is cryptographic: one client's prompt must not be able to collide with another's.
    """
    return hashlib.blake2b(parent + struct.pack(f"<{len(tokens)}q", *tokens), digest_size=16).digest()


class BlockPool:
    """The blocks of a cache: `total` usable ones, numbered from 1 (block 0 receives the padding rows).

    A block is held by one or more sequences, or cached (held by none, but its content can be reused by digest until it
    is evicted, least recently used first), or free.
    """

    def __init__(self, total: int, block_size: int) -> None:
        if total < 1:
            raise ValueError(f"a cache of {total} blocks holds nothing")
        self.total, self.block_size = total, block_size
        self._free: deque[int] = deque(range(1, total + 1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._holders: dict[int, int] = {}
        self._digest_of: dict[int, Digest] = {}
        self._block_of: dict[Digest, int] = {}

    @property
    def free(self) -> int:
        """Number of blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of blocks that no sequence uses, kept for prompts with the same prefix."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that can be taken now: free ones, and cached ones, which are evicted."""
        return len(self._free) + len(self._cached)

    def cached_prefix(self, digests: Sequence[Digest]) -> int:
        """The number of leading digests whose blocks are in the cache."""
        count = 0
        for digest in digests:
            if digest not in self._block_of:
                break
            count += 1
        return count

    def reuse(self, digests: Sequence[Digest]) -> list[int]:
        """Adds a holder to the block of each digest and returns the blocks."""
        blocks = [self._block_of[digest] for digest in digests]
        for block in blocks:
            self._cached.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1
        return blocks

    def take(self, count: int) -> list[int] | None:
        """Takes `count` blocks of undefined content; None, without taking any, if there are too few."""
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            else:
                block, _ = self._cached.popitem(last=False)
                del self._block_of[self._digest_of.pop(block)]
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, digest: Digest) -> None:
        """Records the digest of a held block's content; the first block published for a digest is kept."""
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Releases a sequence's blocks. Its last ones are evicted first, because more prompts share its first ones."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            if block in self._digest_of:
                self._cached[block] = None
            else:
                self._free.append(block)
