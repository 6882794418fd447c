"""The states of recurrent layers, such as Mamba's, which transformers' modules read and update through a cache.

In training a layer starts from nothing at every row's first token. A server keeps a state per sequence: it gives the
modules a cache with the states so far, and takes the new ones from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def are_recurrent(config: Any) -> bool:
    """Whether a model of this transformers configuration has layers that carry a state from token to token."""
    from transformers import cache_utils

    try:
        layers = cache_utils.DynamicCache(config=config).layers
    except Exception:  # a class without a cache may have a configuration that transformers' caches cannot read
        return False
    return any(isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin) for layer in layers)


def cache_argument(model: nn.Module) -> str:
    """The argument of the model's forward method that takes a cache. ValueError if it has none."""
    takes = inspect.signature(type(model).forward).parameters
    found = next((name for name in ("past_key_values", "cache_params", "cache") if name in takes), None)
    if found is None:
        raise ValueError(f"{type(model).__name__} takes no cache with its layers' states")
    return found


@contextmanager
def continuing(model: nn.Module, states: Mapping[str, Tensor] | None, place: Callable[[], str]) -> Iterator[Any]:
    """A context in which the model's rows continue sequences with these states [batch, ...], or begin with None.

    Yields the cache; when the model has run, its `held` are the new states by name, and its `places` the modules that
    used them, as `place` says them. model: a causal language model of transformers, built by `Architecture.build`.
    """
    step: Any = model.tpshard_step
    step.cache = _cache_class()(states, place)
    try:
        yield step.cache
    finally:
        step.cache = None


@cache
def _cache_class() -> Any:
    """The class of caches that hold states; transformers' modules require one of its own `Cache`s."""
    from transformers.cache_utils import Cache

    class StateCache(Cache):  # type: ignore[misc]
        """The states of recurrent layers, by name. Attention finds no past in it: a server has a cache for that."""

        is_compileable = False

        def __init__(self, states: Mapping[str, Tensor] | None, place: Callable[[], str]) -> None:
            self.held = dict(states or {})
            self.places: set[str] = set()
            self.layers: list[Any] = []
            self.latest: Tensor | None = None
            """The recurrent state that was read last."""
            self._place, self._begins = place, states is None

        def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
            return self._get(f"layers.{layer_idx}.conv.{state_idx}")

        def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
            self.latest = self._get(f"layers.{layer_idx}.recurrent.{state_idx}")
            return self.latest

        def update_conv_state(
            self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
        ) -> Tensor:
            """Appends inputs [batch, channels, seq] to the last ones, keeps as many, and returns all of them."""
            name = f"layers.{layer_idx}.conv.{state_idx}"
            before = self._get(name)
            if before is None:
                kept = conv_kernel_size or conv_states.shape[-1]
                inputs = F.pad(conv_states, (max(0, kept - conv_states.shape[-1]), 0))
            else:
                kept = before.shape[-1]
                inputs = torch.cat([before, conv_states], -1)
            self.held[name] = inputs[..., -kept:]
            return inputs

        def update_recurrent_state(
            self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
        ) -> Tensor:
            self.places.add(self._place())
            self.held[f"layers.{layer_idx}.recurrent.{state_idx}"] = recurrent_states
            return recurrent_states

        def _get(self, name: str) -> Tensor | None:
            self.places.add(self._place())
            return None if self._begins else self.held[name]

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return key_states, value_states

        def has_previous_state(self, *_: Any, **__: Any) -> bool:
            return not self._begins

        def is_recording_past(self, layer_idx: int) -> bool:
            return True  # a convolution then appends its inputs by `update_conv_state`, also for one token

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0

        def get_query_offset(self, layer_idx: int = 0) -> int:
            return 0

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
            return query_length, 0

    return StateCache
