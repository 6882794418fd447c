"""The strides of views' results in their operands' storage: a function for each kind of view.

Each takes the op's arguments, the operand's shape and strides, and the result's shape; None stands for a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Shape = tuple[int, ...]
Args = tuple[Any, ...]


def same(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of an identity, or of a contiguous part of a dim (narrow, split): the operand's."""
    return strides


def by_torch(target: Any) -> Callable[[Args, Shape, Shape, Shape], Shape | None]:
    """Returns the function for an op whose results torch always computes as views, such as permute."""

    def strides_of(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
        (result, *_) = pytree.tree_leaves(target(torch.empty_strided(before, strides, device="meta"), *args[1:]))
        return tuple(result.stride())

    return strides_of


of_slice = by_torch(torch.ops.aten.slice.Tensor)


def explicit(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of as_strided(x, size, stride): those in its arguments."""
    return tuple(args[2])


def of_view(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of view(x, shape), which splits, merges, adds or drops dims; None where that needs a copy."""
    return without_copy(before, strides, after)


def of_pairs(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of view_as_complex(x), whose elements have twice the size."""
    return tuple(s // 2 for s in strides[:-1])


def into_pairs(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of view_as_real(x), whose elements have half the size."""
    return (*(2 * s for s in strides), 1)


def dense(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of contiguous(x) and dense_exactly(x), which are views if x is contiguous."""
    return strides if strides == contiguous(before) else None


def last_dense(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of dense_last(x), which is a view if the elements of the last dim are adjacent."""
    return strides if before[-1] == 1 or strides[-1] == 1 else None


def dense_exactly(x: Tensor) -> Tensor:
    """Returns the tensor, or a copy if its strides are not those of a contiguous one, also in dims of size 1, or if it
    starts at an odd element of its storage, where complex numbers do not."""
    dense = x.stride() == contiguous(tuple(x.shape)) and x.storage_offset() % 2 == 0
    return x if dense else x.clone(memory_format=torch.contiguous_format)


def dense_last(x: Tensor) -> Tensor:
    """Returns the tensor, or a copy if the elements of its last dim are not adjacent."""
    # not `contiguous`, which no fake CUDA tensor of a build without CUDA has
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


@cache
def contiguous(shape: Shape) -> Shape:
    """The strides of a contiguous tensor."""
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))


@cache
def without_copy(before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of `before` viewed as `after` without a copy, or None where torch's `view` raises an error."""
    try:
        return torch.empty_strided(before, strides, device="meta").view(after).stride()
    except RuntimeError:
        return None
