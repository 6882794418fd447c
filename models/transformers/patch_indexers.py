"""Indexers on a server: modules that select the keys to which each token attends (DeepSeek-V3.2, GLM-5, HY-V4).

A class's indexer multiplies its queries by its keys, and selects by these scores. On a server the keys are in a cache
that the model does not see. So the class's own code computes with a stand-in for the scores, which accepts only the
operations of `tpshard::select_keys` and in the end records that one operation. What differs between the classes
(rotations, norms, scales) remains their own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from tpshard.kernels.attention.paged_selection import SELECT


def take_place(model: nn.Module) -> None:
    """Makes the model's indexers select among the cached keys of a server."""
    for module in model.modules():
        takes = inspect.signature(module.forward).parameters
        if hasattr(module, "index_topk") and {"attention_mask", "cache"} <= takes.keys():
            module.forward = partial(_select, module)


def _select(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The selection [batch, seq, count] of an indexer: as its own `forward`, with cached keys under a causal mask."""
    step, own = module.tpshard_step, type(module).forward
    bound = inspect.signature(own).bind(module, *args, **kwargs)
    mask = bound.arguments.get("attention_mask")
    if (
        mask is None
        or step.mask is None
        or StorageWeakRef(mask.untyped_storage()) != StorageWeakRef(step.mask.untyped_storage())
    ):
        raise ValueError(
            f"{type(module).__name__} selects keys under a mask of its own, which a server does not support"
        )
    bound.arguments |= {"attention_mask": _Visible(), "cache": _Cache(type(module).__name__, step.longest)}
    try:
        return own(*bound.args, **bound.kwargs)
    except (AttributeError, TypeError) as error:  # of what the stand-ins lack
        raise ValueError(
            f"{type(module).__name__} selects cached keys in a way that a server does not support: {error}"
        ) from error


@dataclass(frozen=True)
class _Visible:
    """The causal mask of cached keys, or what it hides."""

    hidden: bool = False
    dtype = torch.bool

    def __invert__(self) -> _Visible:
        return _Visible(not self.hidden)


@dataclass(frozen=True)
class _Cache:
    """The cache that an indexer extends by its keys."""

    owner: str
    longest: int

    def update_indexer(self, keys: Tensor, layer_idx: int) -> _Scores:
        """The keys [batch, seq, d] with those before them."""
        return _Scores(self.owner, self.longest, keys)


class _Best(NamedTuple):
    indices: Tensor


_AFTER = {
    "matmul": ("update_indexer",), "mul": ("matmul",), "relu": ("matmul", "mul"), "weigh": ("relu",),
    "squeeze": ("weigh",), "masked_fill": ("squeeze",), "topk": ("masked_fill",),
}  # fmt: skip
"""For each operation on scores, those that may come before it; `weigh` is the matmul with the heads' weights."""


class _Scores:
    """The scores of cached keys, as far as an indexer's class has computed them.

    ValueError for what `tpshard::select_keys` does not compute.
    """

    def __init__(self, owner: str, longest: int, keys: Tensor) -> None:
        self.owner, self.longest, self.keys = owner, longest, keys
        self.query: Tensor | None = None
        self.weights: Tensor | None = None
        self.scale = 1.0
        self.done = "update_indexer"

    def _then(self, operation: str, as_known: bool = True) -> _Scores:
        """The scores after one more operation."""
        if not as_known or self.done not in _AFTER[operation]:
            raise self._refusal(operation)
        self.done = operation
        return self

    def _refusal(self, what: str) -> ValueError:
        return ValueError(
            f"{self.owner} computes the scores of cached keys by `{what}` after `{self.done}`, which a server does not "
            "support"
        )

    def __getattr__(self, name: str) -> Any:
        raise self._refusal(name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> _Scores:
        (scores,) = (one for one in args if isinstance(one, cls))
        if func is torch.matmul and not kwargs and args[1] is scores:
            return scores._times(args[0])
        if func is F.relu and args == (scores,):
            return scores._then("relu")
        raise scores._refusal(getattr(func, "__name__", str(func)))

    def transpose(self, *dims: int) -> _Scores:
        """The keys as columns."""
        return self._still_keys("transpose", dims == (-1, -2))

    def unsqueeze(self, dim: int) -> _Scores:
        """The keys for all heads."""
        return self._still_keys("unsqueeze", dim == 1)

    def _still_keys(self, operation: str, as_known: bool) -> _Scores:
        if not as_known or self.done != "update_indexer":
            raise self._refusal(operation)
        return self

    def float(self) -> _Scores:
        return self

    def _times(self, left: Tensor) -> _Scores:
        """Queries [batch, seq, heads, d] times the keys, or weights [batch, seq, 1, heads] times the scores."""
        if self.done == "update_indexer":
            self.query = left
            return self._then("matmul", left.shape[-1] == self.keys.shape[-1])
        self.weights = left.squeeze(-2)
        return self._then("weigh", left.shape[-2] == 1)

    def __mul__(self, scale: Any) -> _Scores:
        self.scale = scale
        return self._then("mul", isinstance(scale, int | float))

    def squeeze(self, dim: int) -> _Scores:
        return self._then("squeeze", dim == -2)

    def masked_fill(self, mask: Any, value: Any) -> _Scores:
        return self._then("masked_fill", isinstance(mask, _Visible) and mask.hidden and value == -torch.inf)

    @property
    def shape(self) -> tuple[int, ...]:
        """[batch, seq, keys]; a server's longest sequence has as many keys."""
        return (*self.keys.shape[:2], self.longest)

    def topk(self, count: int, dim: int) -> _Best:
        """The selection, in which -1 stands for keys that do not exist yet."""
        self._then("topk", dim == -1)
        return _Best(SELECT(self.query, self.keys.unsqueeze(2), self.weights, float(self.scale), count))
