"""Adapted layers: a module keeps its class, its parameters and their names, and gets `lora_A` and `lora_B` beside them.

A linear layer and an embedding add what their adapter computes to their result. Experts and routers add the product of
both factors to their weights, since their weights are read and not their modules called. Both are PEFT's arithmetic. A
server's linear layers and embeddings have adapters in several slots, and each row names the slot of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.kernels.experts.expert_linear import expert_linear
from tpshard.models.adapters.lora import HOLDER, MAGNITUDE, A, Adapter, B
from tpshard.models.families.decoder import Decoder


class AdaptedLayer(nn.Module):
    """What the class of an adapted layer has beside its own."""

    lora: Adapter
    lora_A: nn.Parameter
    lora_B: nn.Parameter


class _Linear(AdaptedLayer):
    lora_magnitude: nn.Parameter

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[operator]
        lora, wide = self.lora, x.to(self.lora_A.dtype)
        dropped = lora.dropout > 0 and self.training
        if dropped:
            wide = F.dropout(wide, lora.dropout)
        added = F.linear(F.linear(wide, self.lora_A), self.lora_B) * lora.scaling
        if not lora.dora:
            return (own + added).to(own.dtype)
        bias = getattr(self, "bias", None)
        weight: Tensor = self.weight  # type: ignore[assignment]
        weight = (weight.t() if lora.layer.turned else weight).to(wide.dtype)
        base = F.linear(wide, weight) if dropped else own if bias is None else own - bias
        share = (self.lora_magnitude / _row_norms(weight, self.lora_A, self.lora_B, lora.scaling)).to(wide.dtype)
        return (own + (share - 1) * base + share * added).to(own.dtype)


class _Table(AdaptedLayer):
    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """ids: [...] -> [..., width]. The row of padding has no gradient, as the table's has none."""
        own: Tensor = super().forward(ids, *args, **kwargs)  # type: ignore[operator]
        padding = getattr(self, "padding_idx", getattr(self, "padding", None))
        added = F.linear(F.embedding(ids, self.lora_A.t(), padding), self.lora_B) * self.lora.scaling
        return (own + added * getattr(self, "embed_scale", 1.0)).to(own.dtype)


class _Weight(AdaptedLayer):
    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight of experts [expert, outputs, inputs], or of a router, with what the adapter adds."""
        own = self._parameters.get("weight")
        own = super().weight if own is None else own  # type: ignore[misc]
        multiply = torch.bmm if self.lora.layer.experts else torch.mm
        return own + (multiply(self.lora_B, self.lora_A) * self.lora.scaling).to(own.dtype)


@dataclass
class RowSlots:
    """The slot of each row's adapter, int64 [1, rows]; a row whose slot is outside of 0 .. slots - 1 has none.
    None: no row has one."""

    of_rows: Tensor | None = None


class _Slots(AdaptedLayer):
    row_slots: RowSlots

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[operator]
        if self.row_slots.of_rows is None:
            return own
        slots = self.row_slots.of_rows.reshape(*x.shape[:-1], 1)
        return own + expert_linear(expert_linear(x.unsqueeze(-2), slots, self.lora_A), slots, self.lora_B).squeeze(-2)


class _TableSlots(AdaptedLayer):
    row_slots: RowSlots

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """ids: [1, rows] -> [1, rows, width]. A row reads the columns of all slots, of which one counts."""
        own: Tensor = super().forward(ids, *args, **kwargs)  # type: ignore[operator]
        if self.row_slots.of_rows is None:
            return own
        slots, numbers = self.row_slots.of_rows.reshape(*ids.shape, 1), torch.arange(self.lora.slots, device=ids.device)
        of_all = F.embedding(ids, self.lora_A.flatten(0, 1).t()).unflatten(-1, (self.lora.slots, self.lora.rank))
        mine = (of_all * (slots == numbers).unsqueeze(-1)).sum(-2)
        added = expert_linear(mine.unsqueeze(-2), slots, self.lora_B).squeeze(-2)
        return own + added * getattr(self, "embed_scale", 1.0)


def _row_norms(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """The norm of each row of an adapted weight, of which no gradient is taken (Liu et al. 2024, section 4.3)."""
    whole = (weight + scaling * (b @ a)).detach()
    return (whole * whole).sum(1).sqrt()


@cache
def _adapted_class(cls: type[nn.Module], mixed: type[AdaptedLayer]) -> type[nn.Module]:
    return type(cls.__name__, (mixed, cls), {})


def _hold(module: Any, leaf: str) -> None:
    """Gives a module a part for the adapter of its parameter `leaf`, which it then reads with what that adds."""
    module.__class__ = _holding_class(module.__class__, leaf)
    module.register_module(leaf + HOLDER, AdaptedLayer())


@cache
def _holding_class(cls: type[nn.Module], leaf: str) -> type[nn.Module]:
    def read(module: Any) -> Tensor:
        own, adapted = module._parameters[leaf], getattr(module, leaf + HOLDER)
        return own + (torch.bmm(adapted.lora_B, adapted.lora_A) * adapted.lora.scaling).to(own.dtype)  # type: ignore[no-any-return]

    return type(cls.__name__, (cls,), {leaf: property(read)})


def adapt(model: nn.Module, adapter: Adapter) -> None:
    """Gives a layer of a model its adapter, whose parameters are fp32 on `meta`."""
    if adapter.layer.head and adapter.layer.shares and isinstance(model, Decoder):
        model.give_head()
    layer = adapter.layer
    if layer.holder:
        _hold(model.get_submodule(layer.path.rpartition(".")[0]), layer.parameter.rpartition(".")[2])
    module: Any = model.get_submodule(layer.path)
    kind = _Weight if layer.experts or layer.router else _Table if layer.table else _Linear
    mixed = kind if not adapter.slots else _TableSlots if layer.table else _Slots
    if not layer.holder:
        module.__class__ = _adapted_class(module.__class__, mixed)
    # alike in layers that are alike
    alike = replace(layer, path="", theirs="", parameter="")
    module.lora = replace(adapter, layer=alike, wrapper="", shared=adapter.shared.rpartition(".")[2])
    module.training = True  # classes of transformers are built without dropout of their own
    for leaf, shape in adapter.shapes.items():
        module.register_parameter(leaf, nn.Parameter(torch.empty(shape, device="meta")))
    if adapter.shared:
        module.register_parameter(A, model.get_submodule(adapter.shared).lora_A)  # one parameter, by its first name


def lora_leaves(adapter: Adapter) -> dict[str, tuple[str, ...]]:
    """For each parameter of an adapter's own, its dims by the names of the weight's: `out`, `in` and `expert`; a
    server's `slot`."""
    stack = ("slot",) if adapter.slots else ("expert",) if adapter.layer.experts else ()
    leaves = {A: (*stack, "rank", "in"), B: (*stack, "out", "rank"), MAGNITUDE: ("out",)}
    return {leaf: leaves[leaf] for leaf in adapter.shapes}


def merged(weight: Tensor, a: Tensor, b: Tensor, adapter: Adapter, magnitude: Tensor | None = None) -> Tensor:
    """Rows and columns of a weight with their adapter, in the weight's dtype; computed in fp32. a: the factor's columns
    for those of `weight`, b: its rows. With DoRA all columns are there."""
    wide = weight.float()
    if adapter.layer.turned:
        wide = wide.transpose(-1, -2)
    wide = wide + (b.float() @ a.float()) * adapter.scaling
    if magnitude is not None:
        wide = wide * (magnitude.float() / wide.norm(dim=1)).unsqueeze(1)
    return (wide.transpose(-1, -2) if adapter.layer.turned else wide).to(weight.dtype)
