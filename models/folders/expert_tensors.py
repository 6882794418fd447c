"""Experts that a folder stores one by one, and that a module of transformers has stacked in one parameter."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tpshard.models.folders.hf_files import Tensors

_MATRICES = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
"""The names of the matrices [outputs, inputs] of one expert, whose outputs follow one another in a parameter."""


@dataclass(frozen=True)
class Stack:
    """The tensors of a folder, one or more per expert, that make up a parameter [expert, outputs, inputs]."""

    experts: tuple[tuple[str, ...], ...]
    """For each expert, the matrices whose outputs follow one another."""

    @staticmethod
    def find(spellings: Iterable[str], count: int, stored: Container[str]) -> Stack | None:
        """The stack of a parameter of `count` experts; None where the folder has no matrix of its first expert.

        spellings: names under which the folder may know the parameter.
        """
        for name in spellings:
            owner, _, leaf = name.rpartition(".")
            for matrices in _MATRICES.get(leaf, ()):
                tensors = [tuple(f"{owner}.{i}.{matrix}.weight" for matrix in matrices) for i in range(count)]
                if any(tensor in stored for tensor in tensors[0]):
                    return Stack(tuple(tensors))
        return None

    @property
    def tensors(self) -> list[str]:
        """The names of all tensors."""
        return [tensor for expert in self.experts for tensor in expert]

    def block(self, tensors: Tensors, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Elements [starts, starts + sizes) of the parameter."""
        if 0 in sizes:
            return torch.empty(*sizes)
        read = self.experts[starts[0] : starts[0] + sizes[0]]
        return torch.stack([_rows(tensors, matrices, starts[1:], sizes[1:]) for matrices in read])

    def misfits(self, shape: Sequence[int], shape_of: Callable[[str], tuple[int, ...]]) -> list[str]:
        """The stored tensors that do not fit a parameter of this `shape`."""
        _, outputs, inputs = shape
        return [
            tensor
            for matrices in self.experts
            for tensor in matrices
            if shape_of(tensor) != (outputs // len(matrices), inputs)
        ]


def _rows(tensors: Tensors, matrices: Sequence[str], starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Reads a block of the matrix that consists of several stored matrices, one below the other."""
    (start, column), (size, columns) = starts, sizes
    parts = []
    for name in matrices:
        rows = tensors.shape(name)[0]
        first, last = max(start, 0), min(start + size, rows)
        if first < last:
            parts.append(tensors.block(name, (first, column), (last - first, columns)))
        start -= rows
    return torch.cat(parts)
