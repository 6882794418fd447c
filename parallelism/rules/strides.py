"""The strides of a view's result in its operand's storage, as torch computes them."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

Shape = tuple[int, ...]
Args = tuple[Any, ...]


def same(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The operand itself."""
    return strides


def permuted(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    return tuple(strides[d] for d in args[1])


def transposed(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """transpose(x, i, j)."""
    order = list(strides)
    i, j = args[1], args[2]
    order[i], order[j] = order[j], order[i]
    return tuple(order)


def turned(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """t(x)."""
    return strides[::-1]


def expanded(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    lead = len(after) - len(before)
    old, full = (1,) * lead + before, (0,) * lead + strides
    return tuple(0 if o == 1 and n != 1 else s for o, n, s in zip(old, after, full))


def piece(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """A contiguous part of a dim."""
    return strides


def sliced(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """slice(x, dim, start, end, step)."""
    dim = (args[1] if len(args) > 1 else 0) % len(before)
    step = args[4] if len(args) > 4 else 1
    return tuple(s * step if d == dim else s for d, s in enumerate(strides))


def selected(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """One index of a dim, which is removed."""
    dim = (args[1] if len(args) > 1 else 0) % len(before)
    return tuple(s for d, s in enumerate(strides) if d != dim)


def diagonal(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """diagonal(x, offset, dim1, dim2)."""
    i, j = (d % len(before) for d in (*args[2:4], *(0, 1)[max(0, len(args) - 2) :]))
    return (*(s for d, s in enumerate(strides) if d not in (i, j)), strides[i] + strides[j])


def unfolded(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """unfold(x, dim, size, step)."""
    dim = args[1] % len(before)
    return (*(s * args[3] if d == dim else s for d, s in enumerate(strides)), strides[dim])


def given(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """as_strided(x, size, stride)."""
    return tuple(args[2])


def reshaped(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """Dims split, merged, added or dropped."""
    return without_copy(before, strides, after)


def of_pairs(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """Pairs of numbers viewed as complex numbers."""
    return tuple(s // 2 for s in strides[:-1])


def into_pairs(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    return (*(2 * s for s in strides), 1)


def dense(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """contiguous(x): a view if x is contiguous."""
    return strides if strides == contiguous(before) else None


def last_dense(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    return strides if before[-1] == 1 or strides[-1] == 1 else None


def dense_last(x: Tensor) -> Tensor:
    """The tensor, copied if the elements of its last dim are not adjacent."""
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
