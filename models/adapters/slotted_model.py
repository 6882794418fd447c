"""A server's model: another model with slots for adapters beside its linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from tpshard.models.adapters.adapted_model import AdaptedModel
from tpshard.models.adapters.lora import Adapter

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Slots:
    """The room for adapters in a server: what its programs know of them."""

    count: int
    """Adapters at once."""
    rank: int
    """Their largest rank; those of a lower one are padded with zeros."""
    layers: tuple[str, ...]
    """The paths of the layers that can have one."""


@dataclass(frozen=True)
class SlottedModel(AdaptedModel):
    """A model in which each row of a step is computed with the adapter whose slot the row names, or with none.

    Slots hold adapters in the dtype of the computation, `lora_B` with its scaling.
    """

    slots: Slots = field(kw_only=True)

    @cached_property
    def adapters(self) -> Mapping[str, Adapter]:
        own, chosen = self.slots, {*self.slots.layers}
        return {
            one.path: Adapter(one, own.rank, 1.0, slots=own.count)
            for one in self.base.adaptable() if one.path in chosen
        }  # fmt: skip

    def module(self, dtype: torch.dtype) -> nn.Module:
        from tpshard.models.adapters.lora_modules import AdaptedLayer, RowSlots

        model, rows = super().module(dtype), RowSlots()
        model.row_slots = rows  # type: ignore[assignment]
        for layer in model.modules():
            if isinstance(layer, AdaptedLayer):
                layer.row_slots = rows  # type: ignore[assignment]
        return model

    def own_dtypes(self, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
        return {**self.base.own_dtypes(dtype), **dict.fromkeys(self.added, dtype)}
