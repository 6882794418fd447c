"""What a model counts while it computes: for the record of a run, not for its loss.

A module says what it will count by `counts = {"load": 8}`, a label and how many numbers that is, and in each forward
pass what it counted by `note`. All are sums over tokens.
"""

from __future__ import annotations

from torch import Tensor, nn


def declared(model: nn.Module) -> dict[str, int]:
    """What a model counts, by the path of the module and the label, and how many numbers each is."""
    return {
        f"{path}.{label}" if path else label: size
        for path, module in model.named_modules()
        for label, size in getattr(module, "counts", {}).items()
    }


def note(module: nn.Module, **values: Tensor) -> None:
    """Says what a module counted in this forward pass."""
    module.counted = {label: value.detach() for label, value in values.items()}  # type: ignore[assignment]


def take(model: nn.Module) -> list[Tensor]:
    """What was counted in the last forward pass, flat, in the order of `declared`; it is forgotten then."""
    found = []
    for module in model.modules():
        if hasattr(module, "counted"):
            found += [module.counted[label].reshape(-1) for label in module.counts]  # type: ignore[index, union-attr]
            del module.counted
    return found
