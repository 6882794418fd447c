"""Adding the parts of a tensor to a sum without joining them first.

    tpshard::add_parts(total, parts, dim) -> total + cat(parts, dim)

The sum has its own dtype, in which the parts are added. `add_parts_` writes it over `total`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from tpshard.kernels.operation import operation


def add_parts_formula(total: Tensor, parts: Sequence[Tensor], dim: int) -> Tensor:
    """`add_parts` in torch's ops, as a compiler writes it without joining the parts."""
    return torch.cat([own + part.to(own.dtype) for own, part in _pairs(total, parts, dim)], dim)


def _pairs(total: Tensor, parts: Sequence[Tensor], dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each part with its place in the sum."""
    start = 0
    for part in parts:
        yield total.narrow(dim, start, part.shape[dim]), part
        start += part.shape[dim]


def _add(total: Tensor, parts: Sequence[Tensor], dim: int) -> Tensor:
    for own, part in _pairs(total, parts, dim):
        own.add_(part)
    return total


operation("add_parts_(Tensor(a!) total, Tensor[] parts, int dim) -> Tensor(a!)", _add, lambda total, parts, dim: total)
add_parts = operation(
    "add_parts(Tensor total, Tensor[] parts, int dim) -> Tensor",
    lambda total, parts, dim: _add(total.clone(), parts, dim),
    lambda total, parts, dim: torch.empty_like(total),
)
