"""A cache of op results by shapes: equal layers ask the fake tensor mode only once."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from tpshard.parallelism.graph import Ref


class Like(NamedTuple):
    """The metadata of a fake tensor with unknown content."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Shapes:
    """Runs ops on fake tensors, and caches their results.

    Only for ops that change nothing in place, on fake tensors of unknown content. Views are not cached: they share
    their source's storage, as autograd expects, and are made directly from meta tensors.
    """

    def __init__(self) -> None:
        self.known: dict[Any, tuple[type | None, list[Like]]] = {}
        """By op and arguments: the type of the returned sequence, if it is one, and the tensors."""

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], refs: Any, operands: list[Tensor]) -> Any:
        """`func(*args, **kwargs)`. refs: all arguments, with a `Ref` for each tensor in `operands`."""
        key = _key(func, refs, operands)
        if key is None:
            return func(*args, **kwargs)
        if _is_view(func):
            return _view(func, args, kwargs, operands[0])
        known = self.known.get(key)
        if known is not None:
            sequence, likes = known
            mode = operands[0].fake_mode  # type: ignore[attr-defined]
            made = [fake(mode, like) for like in likes]
            return made[0] if sequence is None else sequence(made)
        made = func(*args, **kwargs)
        several = type(made) in (list, tuple)
        found = [_like(one) for one in (made if several else (made,))]
        likes = [like for like in found if like is not None]
        if len(likes) == len(found) and not any(made is operand for operand in operands):
            self.known[key] = (type(made) if several else None, likes)
        return made


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
    """A view of a fake tensor, made below all dispatch modes."""
    unseen, below = torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd()
    try:
        made = func(*args, **kwargs)
    finally:
        del unseen, below
    if isinstance(made, Tensor):
        return FakeTensor(source.fake_mode, made, source.fake_device)
    return type(made)([FakeTensor(source.fake_mode, one, source.fake_device) for one in made])


def _exact(arg: Any, ours: bool) -> Any:
    """An argument as a cache key: 1, 1.0 and True are equal in Python, but promote dtypes differently.

    ours: whether the op belongs to tpshard, whose strings are names of values.
    """
    if isinstance(arg, Ref):
        return arg
    if isinstance(arg, (tuple, list)):
        return tuple([_exact(a, ours) for a in arg])
    if isinstance(arg, dict):
        return tuple([(name, _exact(a, ours)) for name, a in arg.items()])
    if ours and isinstance(arg, str):
        return None
    return (type(arg), arg) if isinstance(arg, (int, float)) else arg


def fake(mode: FakeTensorMode, like: Like) -> Tensor:
    """A new fake tensor, made below all dispatch modes.

    It has its own meta tensor: fake tensors that share one also share its version, so that autograd would take a change
    of one for a change of all.
    """
    unseen = torch._C._DisableTorchDispatch()
    try:
        empty = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device="meta")
    finally:
        del unseen
    return FakeTensor(mode, empty, like.device)
