"""CUDA graphs for decoding: a step of few rows is thousands of small launches, replayed as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Program = Callable[..., Tensor]
MOST_ROWS = 64
"""Steps with more rows keep the device busy without it."""
_WARM = 3


class Captured:
    """One size of a program, captured: static inputs, and the output that every replay writes."""

    def __init__(self, program: Program, like: Sequence[Tensor], fixed: Sequence[Tensor], pool: Any) -> None:
        self.inputs = [torch.zeros_like(x) for x in like]  # zeros: rows of block 0, which is nobody's
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM):  # kernels are compiled and measured before anything is captured
                program(*self.inputs, *fixed)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.output = program(*self.inputs, *fixed)

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        for held, given in zip(self.inputs, inputs):
            held.copy_(given)
        self.graph.replay()
        return self.output


class Replayed:
    """A program whose small steps are captured at their first use, a graph a size, and replayed from then on.

    Tables get the width of the longest sequence, so that a size is (rows, wanted rows) and nothing else.
    """

    def __init__(self, program: Program, fixed: Sequence[Tensor], width: int) -> None:
        self.program, self.fixed, self.width = program, fixed, width
        self._graphs: dict[tuple[int, int], Captured] = {}
        self._pool: Any = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """inputs: tokens, positions, slots, sequences [1,rows], tables [m,w], wanted [n] on the device"""
        *row, tables, wanted = inputs
        rows = row[0].shape[1]
        if rows > MOST_ROWS:
            return self.program(*inputs, *self.fixed)
        wide = tables.new_zeros(rows + 1, self.width)
        wide[: tables.shape[0], : tables.shape[1]] = tables
        size = (rows, wanted.shape[0])
        if size not in self._graphs:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._graphs[size] = Captured(self.program, [*row, wide, wanted], self.fixed, self._pool)
        return self._graphs[size]([*row, wide, wanted])
