"""The paged cache's book-keeping: which block belongs to whom, and what computed blocks can be used again."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict, deque
from collections.abc import Sequence

Digest = bytes
ROOT: Digest = b""


def chain(parent: Digest, tokens: Sequence[int]) -> Digest:
    """Names a full block by its tokens and everything before them. A cryptographic hash: one client's prompt must
    not be able to collide with another's."""
    return hashlib.blake2b(parent + struct.pack(f"<{len(tokens)}q", *tokens), digest_size=16).digest()


def chains(tokens: Sequence[int], block_size: int) -> list[Digest]:
    """The digests of all full blocks of `tokens`."""
    digests, parent = [], ROOT
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = chain(parent, tokens[start : start + block_size])
        digests.append(parent)
    return digests


class BlockPool:
    """`total` usable blocks, numbered from 1 (block 0 takes the padding rows).

    A block is held (by one or more sequences), cached (by nobody, its content still known by digest, reused or evicted
    in least-recently-used order), or free.
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
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that can be taken now: free ones, and cached ones by evicting them."""
        return len(self._free) + len(self._cached)

    def known(self, digests: Sequence[Digest]) -> int:
        """How many leading digests have their block here."""
        count = 0
        for digest in digests:
            if digest not in self._block_of:
                break
            count += 1
        return count

    def reuse(self, digests: Sequence[Digest]) -> list[int]:
        """Takes the blocks of known digests."""
        blocks = [self._block_of[digest] for digest in digests]
        for block in blocks:
            self._cached.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1
        return blocks

    def take(self, count: int) -> list[int] | None:
        """`count` blocks of unknown content, or None, and nothing taken, where there are not as many."""
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
        """Says what a held block now contains; kept under the first block published for a digest."""
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Gives blocks back, the last ones first to be evicted: a prefix outlives its continuations."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            if block in self._digest_of:
                self._cached[block] = None
            else:
                self._free.append(block)
