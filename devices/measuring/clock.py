"""A clock for one process of a crowd that measures, and memory that no process has touched."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import torch
from torch import Tensor

FRESH_BYTES = 1 << 24
LEAST_S = 0.04


class Clock:
    """Measures the seconds of a call in one process of a crowd.

    A process with one thread is timed by its own CPU time, times the number of processes per core, so that programs
    outside of the crowd do not count. Several threads are timed by the wall clock.
    """

    def __init__(self, threads: int, turns: float):
        self.read, self.turns = (time.process_time, turns) if threads == 1 else (time.perf_counter, 1.0)
        self.share = turns / threads
        """Wall seconds per CPU second, if the process's threads divide the work."""

    def seconds(self, run: Callable[[], object], least_s: float = LEAST_S) -> float:
        """Mean seconds of a call, without the first and the slowest tenth of calls, over at least `least_s` in all.

        A step is a sum of operations, so the mean is right: a median would ignore delays that only some of them have.
        """
        run()
        samples: list[float] = []
        end = self.read() + least_s
        while (begun := self.read()) < end or len(samples) < 3:
            run()
            samples.append(self.read() - begun)
        return self._mean(samples)

    def _mean(self, samples: list[float]) -> float:
        fastest = sorted(samples)[: len(samples) * 9 // 10]
        return sum(fastest) / len(fastest) * self.turns

    def behind(self, run: Callable[[int], object], before: Callable[[int], object] = lambda i: None) -> float:
        """Mean seconds of `run(i)`, without the slowest tenth; `before(i)` runs untimed before each call."""
        samples = []
        for i in range(100):
            before(i)
            begun = self.read()
            run(i)
            samples.append(self.read() - begun)
        return self._mean(samples)


def new_memory(size: int) -> Tensor:
    """A float tensor of `size` bytes in newly mapped pages, which are returned to the system when it is freed."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.float32)
