"""A test case of one op: a function of tensors that calls it, written in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


@dataclass
class Of:
    """The description of a tensor: fp64 numbers, integers in [`low`, `high`), or bools."""

    shape: tuple[int, ...]
    high: int = 0
    dtype: torch.dtype = torch.float64
    low: int = 0

    def make(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.high:
            return torch.randint(self.low, self.high, self.shape, generator=generator).to(self.dtype)
        return torch.rand(self.shape, generator=generator, dtype=torch.float64).add(0.25).to(self.dtype)


def f(*shape: int) -> Of:
    return Of(shape)


def ints(high: int, *shape: int, low: int = 0) -> Of:
    return Of(shape, high, torch.int64, low)


def octets(*shape: int) -> Of:
    return Of(shape, 256, torch.uint8)


def truths(*shape: int) -> Of:
    return Of(shape, 2, torch.bool)


@dataclass
class Case:
    """A function of tensors that calls an op."""

    fn: Callable[..., Any]
    tensors: list[Tensor]
    eager: Callable[..., Any] | None = None
    """What computes the same where the op cannot run by itself on a CPU."""
    written: tuple[int, ...] = ()
    """Tensors that the op writes to: inputs that lie as it needs them."""


def call(target: Any, *args: Any, **kwargs: Any) -> Case:
    """`target(*args, **kwargs)`"""
    leaves, tree = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Of)]

    def fn(*tensors: Tensor) -> Any:
        full = list(leaves)
        for i, tensor in zip(places, tensors):
            full[i] = tensor
        inputs, named = tree_unflatten(full, tree)
        return target(*inputs, **named)

    return Case(fn, [leaves[i].make(n) for n, i in enumerate(places)])


def of(fn: Callable[..., Any], *operands: Of, eager: Any = None, written: tuple[int, ...] = ()) -> Case:
    return Case(fn, [g.make(n) for n, g in enumerate(operands)], eager, written)


def flat(results: Any) -> list[Any]:
    return [m for m in tree_flatten(results)[0] if isinstance(m, Tensor)]
