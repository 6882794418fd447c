"""CUDA graphs for small steps: a step's thousands of kernel launches are captured once and replayed as one.

With several ranks each captures its own steps, collectives included: all ranks meet a size for the first time in the
same step. Groups connect in the runs before the capture, since they cannot while a graph is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_WARM = 3


class Captured:
    """A program of one size, captured as a CUDA graph at its first call, with static inputs and outputs.

    brought: the indices of the inputs that change between calls. pool: the memory pool that graphs share. tables: the
    index of the block tables, if there are any; width: their columns, as many as the longest sequence has blocks.
    """

    def __init__(
        self, run: Callable[..., list[Tensor]], brought: Sequence[int], pool: Any, tables: int | None = None,
        width: int = 0,
    ) -> None:  # fmt: skip
        self._run, self._brought, self._tables, self._width, self._pool = run, brought, tables, width, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Any] = []
        self._output: list[Tensor] = []

    def __call__(self, *inputs: Any) -> list[Tensor]:
        """Runs the program on its inputs, which are on the device."""
        if self._graph is None:
            self._capture(inputs)
        assert self._graph is not None
        for i in self._brought:
            value, held = inputs[i], self._inputs[i]
            if i == self._tables:
                held.zero_()
                held = held[: value.shape[0], : value.shape[1]]
            held.copy_(value)
        self._graph.replay()
        return self._output

    def _capture(self, inputs: Sequence[Any]) -> None:
        self._inputs = list(inputs)
        for i in self._brought:  # zeros: rows of block 0, which belongs to no sequence
            self._inputs[i] = torch.zeros_like(inputs[i])
        if self._tables is not None:
            # a step with this many rows has at most this many sequences, plus one for padding
            rows = inputs[self._brought[0]].shape[1]
            self._inputs[self._tables] = inputs[self._tables].new_zeros(rows + 1, self._width)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM):  # compiles and measures kernels before the capture
                self._run(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # other threads ask events meanwhile: NCCL's, and the watchdog that names what hangs
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            self._output = self._run(*self._inputs)
