"""Keeps shapes and dtypes of ops' results on fake tensors, so that equal layers and later captures trace faster."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from tpshard.parallelism.graph import Ref


class Like(NamedTuple):
    """The shape, strides, dtype and device of a fake tensor with unknown content."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


MOST = 20_000
"""Results that are kept, a kB each."""


class Shapes:
    """Runs ops on fake tensors, and caches their results.

    Only for ops that change nothing in place, on fake tensors of unknown content. Views are not cached: they share
    their source's storage, as autograd expects, and are made directly from meta tensors.
    """

    def __init__(self) -> None:
        self.results = _results_of(torch.get_default_dtype())

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], refs: Any, operands: list[Tensor]) -> Any:
        """Runs `func(*args, **kwargs)`, or takes its results from the cache.

        refs: all arguments, with a `Ref` for each tensor in `operands`.
        """
        key = _key(func, refs, operands)
        if key is None:
            return func(*args, **kwargs)
        if _is_view(func):
            return _view(func, args, kwargs, operands[0])
        cached = self.results.get(key)
        if cached is not None:
            sequence, likes = cached
            mode = operands[0].fake_mode  # type: ignore[attr-defined]
            tensors = [fake(mode, like) for like in likes]
            return tensors[0] if sequence is None else sequence(tensors)
        result = func(*args, **kwargs)
        several = type(result) in (list, tuple)
        results = [_like(one) for one in (result if several else (result,))]
        likes = [like for like in results if like is not None]
        if len(likes) == len(results) and not any(result is operand for operand in operands):
            if len(self.results) >= MOST:
                self.results.clear()
            self.results[key] = (type(result) if several else None, likes)
        return result


@cache
def _results_of(dtype: torch.dtype) -> dict[Any, tuple[type | None, list[Like]]]:
    """The results of all captures with this default dtype, by op and arguments: the type of the returned sequence, if
    it is one, and the tensors."""
    return {}


def _key(func: Any, refs: Any, operands: list[Tensor]) -> Any:
    """The cache key of an op's results; None where they depend on more than shapes."""
    likes = [_like(operand) for operand in operands]
    if not likes or None in likes or func._schema.is_mutable:
        return None
    key = (func, _exact(refs, func.namespace == "tpshard"), tuple(likes))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _like(tensor: Any) -> Like | None:
    """The metadata of a tensor; None if it is not fake, its content is known, or it may be conjugated (complex)."""
    if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.dtype.is_complex:
        return None
    return Like(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.fake_device)


@cache
def _is_view(func: Any) -> bool:
    """Whether an op of torch returns only a view of its operand."""
    returns = func._schema.returns
    return func.namespace == "aten" and bool(returns) and all(r.alias_info is not None for r in returns)


def _view(func: Any, args: Any, kwargs: Any, source: Any) -> Any:
    """Runs a view op on a fake tensor, below all dispatch modes."""
    unseen, below = torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd()
    try:
        result = func(*args, **kwargs)
    finally:
        del unseen, below
    if isinstance(result, Tensor):
        return FakeTensor(source.fake_mode, result, source.fake_device)
    return type(result)([FakeTensor(source.fake_mode, one, source.fake_device) for one in result])


def _exact(arg: Any, own_op: bool) -> Any:
    """An argument as a part of a cache key, with its type: 1, 1.0 and True are equal, but promote dtypes differently.

    own_op: whether the op belongs to tpshard, whose strings are names of values.
    """
    if isinstance(arg, Ref):
        return arg
    if isinstance(arg, (tuple, list)):
        return tuple([_exact(a, own_op) for a in arg])
    if isinstance(arg, dict):
        return tuple([(name, _exact(a, own_op)) for name, a in arg.items()])
    if own_op and isinstance(arg, str):
        return None
    return (type(arg), arg) if isinstance(arg, (int, float)) else arg


def fake(mode: FakeTensorMode, like: Like) -> Tensor:
    """Makes a fake tensor, below all dispatch modes.

    It gets a meta tensor of its own: fake tensors with one meta tensor share its version, so that autograd would take a
    change of one of them for a change of all.
    """
    unseen = torch._C._DisableTorchDispatch()
    try:
        empty = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device="meta")
    finally:
        del unseen
    return FakeTensor(mode, empty, like.device)
