"""Counters that a model updates while it computes, such as the tokens of each expert, for a run's metrics.

A module declares its counters as `counts = {"load": 8}`, a label and the number of values. In each forward pass it
reports them by `note`. All values are sums over tokens.
"""

from __future__ import annotations

from torch import Tensor, nn
from tpshard.models.dims import declared


def declared_counters(model: nn.Module) -> dict[str, int]:
    """The counters of a model by module path and label, with their number of values."""
    return declared(model, "counts")


def note(module: nn.Module, **values: Tensor) -> None:
    """Reports the values of a module's counters for this forward pass."""
    module.counted = {label: value.detach() for label, value in values.items()}  # type: ignore[assignment]


def take(model: nn.Module) -> list[Tensor]:
    """The counters of the last forward pass, each flattened, in the order of `declared_counters`. Resets them."""
    counted = []
    for module in model.modules():
        if hasattr(module, "counted"):
            counted += [module.counted[label].reshape(-1) for label in module.counts]  # type: ignore[index, union-attr]
            del module.counted
    return counted
