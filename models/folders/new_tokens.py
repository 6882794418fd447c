"""Weights of a smaller vocabulary for a model of a larger one: the rows of new tokens are the mean of the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from tpshard.models.model_spec import StoredWeights

Shapes = Mapping[str, Sequence[int]]
ROWS = 1 << 22
"""Elements of a stored table that are read at once for its mean."""


def note(stored: int | None, vocab: int | None) -> list[str]:
    """A sentence on the tokens that a model of `vocab` tokens has beyond the stored ones, if it has some."""
    if stored is None or vocab is None or vocab <= stored:
        return []
    return [f"`model.vocab` adds {vocab - stored:,} tokens to {stored:,}: each of their rows begins as the mean of all"]


def widened(
    read: Callable[..., Tensor], stored: Shapes, now: Shapes, vocab: tuple[int | None, int | None]
) -> Callable[..., Tensor]:
    """The reader of blocks (name, starts, sizes) of parameters whose dim of the vocabulary may be longer than stored.

    vocab: the tokens that are stored, and those of now. ValueError where shapes differ otherwise.
    """
    dims: dict[str, int] = {}
    for name in dict.fromkeys((*now, *stored)):
        one, two = tuple(stored.get(name, ())), tuple(now.get(name, ()))
        apart = [dim for dim, pair in enumerate(zip(one, two)) if pair[0] != pair[1]]
        if (name in now) != (name in stored) or len(one) != len(two):
            apart = [-1]
        if apart and (
            apart == [-1] or [(one[dim], two[dim]) for dim in apart] != [vocab] or one[apart[0]] > two[apart[0]]
        ):
            shapes = [str(list(shape)) if name in of else "missing" for of, shape in ((stored, one), (now, two))]
            raise ValueError(f"it is of another model: `{name}` is {shapes[0]} there and {shapes[1]} here")
        dims |= dict.fromkeys([name] * len(apart), apart[0] if apart else 0)

    def block(name: str, starts: Sequence[int], sizes: Sequence[int], *rest: Any) -> Tensor:
        if name not in dims or starts[dims[name]] + sizes[dims[name]] <= stored[name][dims[name]]:
            return read(name, starts, sizes, *rest)
        import torch

        dim, rows = dims[name], stored[name][dims[name]]

        def part(start: int, size: int) -> Tensor:
            return read(
                name, (*starts[:dim], start, *starts[dim + 1 :]), (*sizes[:dim], size, *sizes[dim + 1 :]), *rest
            )

        at_once = max(1, ROWS * sizes[dim] // max(1, math.prod(sizes)))
        parts = (part(start, min(at_once, rows - start)) for start in range(0, rows, at_once))
        mean = reduce(torch.add, (one.double().sum(dim, keepdim=True) for one in parts)) / rows
        own = part(min(starts[dim], rows), max(0, rows - starts[dim]))
        new = sizes[dim] - own.shape[dim]
        return torch.cat([own, mean.to(own.dtype).expand(*sizes[:dim], new, *sizes[dim + 1 :])], dim)

    return block if dims else read


class WidenedWeights:
    """A folder's weights, read by `widened`."""

    def __init__(
        self, stored: StoredWeights, shapes: Shapes, now: Shapes, vocab: tuple[int | None, int | None]
    ) -> None:
        self.stored, self.quantized = stored, stored.quantized
        self.read = widened(stored.block, shapes, now, vocab)

    def block(self, name: str, starts: Sequence[int], sizes: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Elements [starts, starts + sizes) of parameter `name`; dtype defaults to that of the file."""
        return self.read(name, starts, sizes, dtype)
