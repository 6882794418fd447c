"""The memory that the allocator of a GPU reserves for a step: the allocations of its programs, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpshard.parallelism.pricing.allocator import CachingAllocator
from tpshard.parallelism.pricing.cost import Device
from tpshard.parallelism.pricing.liveness import Memory

STEPS = 2
"""Steps that are replayed: the second begins with what the first one left in pieces."""


class Turn(NamedTuple):
    """A run of a program in a step."""

    memory: Memory
    until: int
    """Index of the run after which its results are freed."""
    shared: int = 0
    """Bytes that it leaves, until then, of what was to be freed after it."""


@dataclass(frozen=True)
class Replay:
    """What a device allocates: `static` bytes of each tensor that stays, and the programs that it runs in a step."""

    static: Sequence[int]
    turns: Sequence[Turn]

    def reserved_bytes(self, device: Device, *, expandable: bool = True) -> int:
        """The most bytes that the allocator reserves at once.

        expandable: with the segments that runs of tpshard ask for (`expandable_segments:True`).
        """
        allocator = CachingAllocator(expandable=expandable, capacity=device.memory_bytes - device.context_bytes)
        for size in filter(None, self.static):
            allocator.malloc(size)
        orders = {id(turn.memory): _order(turn.memory) for turn in self.turns}
        for _ in range(STEPS):
            results: dict[int, list[int]] = {}
            for i, turn in enumerate(self.turns):
                results.setdefault(turn.until, []).extend(_run(allocator, *orders[id(turn.memory)]))
                for key in results.pop(i, ()):
                    allocator.free(key)
                if turn.shared:
                    results.setdefault(turn.until, []).append(allocator.malloc(turn.shared))
        return allocator.most_reserved


def _order(memory: Memory) -> tuple[list[int], list[int]]:
    """The sizes of what a program allocates, and the order: i allocates the i-th, ~i frees it."""
    spans = [*memory.spans, *memory.taken]
    last = len(memory.curve)
    changes = [(span.start, 1, i, i) for i, span in enumerate(spans)]
    changes += [(span.end, 0, i, ~i) for i, span in enumerate(spans) if span.end <= last]
    return [span.bytes for span in spans], [change for *_, change in sorted(changes)]


def _run(allocator: CachingAllocator, sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """Runs a program, and returns what its results are freed by."""
    keys: dict[int, int] = {}
    for change in order:
        if change >= 0:
            keys[change] = allocator.malloc(sizes[change])
        else:
            allocator.free(keys.pop(~change))
    return list(keys.values())
