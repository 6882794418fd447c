"""The strides of views' results in their operands' storage, as torch computes them: a function for each kind of view.

Each takes the op's arguments, the operand's shape and strides, and the result's shape; None stands for a copy.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
Args = tuple[Any, ...]


def same(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of an identity, or of a contiguous part of a dim (narrow, split): the operand's."""
    return strides


def of_permute(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of permute(x, order): x's in that order."""
    return tuple(strides[d] for d in args[1])


def of_transpose(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of transpose(x, i, j): x's with two swapped."""
    order = list(strides)
    i, j = args[1], args[2]
    order[i], order[j] = order[j], order[i]
    return tuple(order)


def of_t(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of t(x): x's reversed."""
    return strides[::-1]


def of_expand(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of expand(x, size): x's, and 0 for repeated dims."""
    lead = len(after) - len(before)
    old, full = (1,) * lead + before, (0,) * lead + strides
    return tuple(0 if o == 1 and n != 1 else s for o, n, s in zip(old, after, full))


def of_slice(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of slice(x, dim, start, end, step): x's, with the dim's times the step."""
    dim = (args[1] if len(args) > 1 else 0) % len(before)
    step = args[4] if len(args) > 4 else 1
    return tuple(s * step if d == dim else s for d, s in enumerate(strides))


def of_select(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of select and unbind: x's without the dim's."""
    dim = (args[1] if len(args) > 1 else 0) % len(before)
    return tuple(s for d, s in enumerate(strides) if d != dim)


def diagonal(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of diagonal(x, offset, dim1, dim2): the new last dim has the sum of both dims' strides."""
    i, j = (d % len(before) for d in (*args[2:4], *(0, 1)[max(0, len(args) - 2) :]))
    return (*(s for d, s in enumerate(strides) if d not in (i, j)), strides[i] + strides[j])


def of_unfold(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of unfold(x, dim, size, step): the dim's times the step, and the dim's own for the new last dim."""
    dim = args[1] % len(before)
    return (*(s * args[3] if d == dim else s for d, s in enumerate(strides)), strides[dim])


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
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


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
    """The strides of `before` viewed as `after` without a copy, or None (the rule of torch's `view`)."""
    if 0 in before:
        return contiguous(after)
    chunks: list[tuple[int, int]] = []  # (elements, stride of the last), each contiguous
    for size, stride in zip(before, strides):
        if size == 1:
            continue
        if chunks and chunks[-1][1] == size * stride:
            chunks[-1] = (chunks[-1][0] * size, stride)
        else:
            chunks.append((size, stride))
    out: list[int] = []
    left, step = 1, 1
    pending = list(reversed(chunks))
    for size in reversed(after):
        if size == 1:
            out.append(step)
            continue
        if left == 1:
            if not pending:
                return None
            left, step = pending.pop(0)
        if left % size:
            return None
        out.append(step)
        step, left = step * size, left // size
    return tuple(reversed(out))
