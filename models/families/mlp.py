"""The MLPs of a layer: SwiGLU, GELU and mixture of experts.   x: [batch, seq, embed] -> [batch, seq, embed]"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.kernels.experts.experts import experts
from tpshard.kernels.experts.slots import from_slots, to_slots
from tpshard.models.counts import note
from tpshard.models.dims import name
from tpshard.models.families.dispatch import ExpertGroups, by_groups
from tpshard.models.families.layers import Parts
from tpshard.models.families.routing import Routes, route, sequence_loss, slots, slots_of, with_gradient


class SwiGLU(nn.Module):
    """The gated MLP down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.gate, self.up, self.down = map(parts, ("gate", "up", "down"))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, embed] -> [batch, seq, embed]."""
        hidden = name(F.silu(self.gate(x)) * self.up(x), "hidden", "batch", "seq", "mlp")
        return self.down(hidden)  # type: ignore[no-any-return]


class GELU(nn.Module):
    """The MLP down(gelu(up(x))), with the tanh approximation."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.up, self.down = map(parts, ("up", "down"))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, embed] -> [batch, seq, embed]."""
        hidden = name(F.gelu(self.up(x), approximate="tanh"), "hidden", "batch", "seq", "mlp")
        return self.down(hidden)  # type: ignore[no-any-return]


class MoE(nn.Module):
    """A mixture of SwiGLU experts: each token's `top_k` routed experts, weighted, plus the shared experts.

    Source: Shazeer et al. 2017; Dai et al. 2024. With a capacity, tokens are copied to slots of the experts, tokens
    without a slot are dropped, and sharded experts exchange them by all-to-all. Without one, experts compute all their
    tokens, which `group_experts` also makes them exchange by all-to-all.
    """

    groups: ExpertGroups | None = None

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.config = c = parts.config
        assert c.experts is not None
        self.counts = {"load": c.experts} | ({"dropped": 1} if c.capacity is not None else {})
        self.router = parts("router")
        if self.router.bias is not None:
            self.router.balanced = {"bias": c.balance_rate}  # type: ignore[assignment]
        self.experts = nn.ModuleDict({name: parts(f"experts.{name}") for name in ("gate", "up", "down")})
        self.shared = SwiGLU(parts.inside("shared")) if c.shared_experts else None

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, embed] -> [batch, seq, embed]."""
        c = self.config
        routes = route(x, self.router.weight, self.router.bias, c)  # type: ignore[arg-type]
        load = routes.chosen.sum((0, 1, 2))
        y = self._all(x, routes, load) if c.capacity is None else self._in_slots(x, routes, load)
        if c.balance == "bias":
            y = with_gradient(y, self.router.bias, load)  # type: ignore[arg-type]
        elif c.balance == "loss":
            loss = sequence_loss(routes)
            y = with_gradient(y, loss, torch.full_like(loss, c.balance_rate))
        return y if self.shared is None else y + self.shared(x)  # type: ignore[no-any-return]

    def _all(self, x: Tensor, routes: Routes, load: Tensor) -> Tensor:
        weights: list[Tensor] = [self.experts[name].weight for name in ("gate", "up", "down")]  # type: ignore[misc]
        if self.groups is None:
            note(self, load=load)
            return experts(x, routes.ids, routes.weights, *weights)  # type: ignore[arg-type]
        y, missed = by_groups(x, routes, weights, self.groups)
        note(self, load=load, gathered=missed)
        return y

    def _in_slots(self, x: Tensor, routes: Routes, load: Tensor) -> Tensor:
        gate, up, down = (self.experts[name].weight for name in ("gate", "up", "down"))
        size = slots_of(x.shape[1], self.config)
        slot_of = slots(routes, size)
        note(self, load=load, dropped=(slot_of < 0).float().sum())
        inside = to_slots(x, slot_of, load.numel() * size).unflatten(1, (-1, size)).transpose(0, 1)
        inside = name(inside, "dispatched", "expert", "group", "slot", "embed")
        hidden = F.silu(torch.einsum("ebcm,ehm->ebch", inside, gate)) * torch.einsum("ebcm,ehm->ebch", inside, up)
        hidden = name(hidden, "hidden", "expert", "group", "slot", "mlp")
        out = name(torch.einsum("ebch,emh->ebcm", hidden, down), "computed", "expert", "group", "slot", "embed")
        return from_slots(out.transpose(0, 1).flatten(1, 2), slot_of, routes.weights)


def group_experts(model: nn.Module, groups: ExpertGroups) -> None:
    """Makes the mixtures of a model without a capacity send tokens to groups of their experts."""
    for module in model.modules():
        if isinstance(module, MoE):
            module.groups = groups
            module.counts["gathered"] = 1


MLPS: Mapping[str, Callable[[Parts], nn.Module]] = {"swiglu": SwiGLU, "gelu": GELU, "moe": MoE}
"""The MLPs by the names that `models.catalog` uses."""
