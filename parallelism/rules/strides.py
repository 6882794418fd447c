"""Where the result of a view lies in its operand's storage: the strides that torch gives it."""

from __future__ import annotations

from functools import cache
from typing import Any

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
    """Part of a dim, every element of it."""
    return strides


def sliced(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """slice(x, dim, start, end, step)."""
    dim = (args[1] if len(args) > 1 else 0) % len(before)
    step = args[4] if len(args) > 4 else 1
    return tuple(s * step if d == dim else s for d, s in enumerate(strides))


def selected(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """One index of a dim, which disappears."""
    dim = (args[1] if len(args) > 1 else 0) % len(before)
    return tuple(s for d, s in enumerate(strides) if d != dim)


def given(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """as_strided(x, size, stride)."""
    return tuple(args[2])


def reshaped(args: Args, before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """Dims split, merged, added or dropped."""
    return without_copy(before, strides, after)


@cache
def contiguous(shape: Shape) -> Shape:
    """Strides of a contiguous tensor."""
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))


@cache
def without_copy(before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """Strides of `before` seen as `after` without a copy, or None (the rule of torch's `view`)."""
    if 0 in before:
        return contiguous(after)
    chunks: list[tuple[int, int]] = []  # (elements, stride of the last), each contiguous in itself
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
