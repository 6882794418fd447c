"""tpshard's expert operations for classes whose experts do not go through transformers' experts interface.

These classes read in Python how many tokens each expert has, or compute every expert for every token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tpshard.kernels.experts.expert_linear import expert_linear
from tpshard.kernels.experts.experts import experts


def take_place(model: nn.Module) -> None:
    """Replaces the methods of the modules in `_OWN`."""
    for module in model.modules():
        for method, function in _OWN.get(type(module).__name__, {}).items():
            setattr(module, method, partial(function, module))


def _llama4(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4's mixture: hidden [..., embed] -> ([tokens, embed], the router's logits [tokens, experts]).

    A token's score multiplies what its experts read, not what they compute.
    """
    tokens = hidden.reshape(-1, hidden.shape[-1])
    scores, logits = module.router(tokens)
    ids = torch.topk(logits, module.top_k, dim=1).indices
    read = tokens.unsqueeze(1) * scores.gather(1, ids).unsqueeze(-1)
    own = module.experts
    gate, up = _halves(expert_linear(read, ids, own.gate_up_proj.transpose(1, 2)), -1)
    computed = expert_linear(up * own.act_fn(gate), ids, own.down_proj.transpose(1, 2))
    return module.shared_expert(tokens) + computed.sum(1), logits


def _longcat(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """LongCat-Flash's experts: hidden [tokens, embed], ids and weights [tokens, top_k] -> [tokens, embed].

    Experts with a number of `num_routed_experts` and above return what they read.
    """
    count = module.num_routed_experts
    idle = (weights * (ids >= count)).sum(1, keepdim=True).to(hidden.dtype)
    if module.gate_up_proj is None:
        return hidden * idle
    gate, up = _halves(module.gate_up_proj[:count], 1)
    return experts(hidden, ids, weights.to(hidden.dtype), gate, up, module.down_proj) + hidden * idle


def _jetmoe_mixture(module: Any, hidden: Tensor) -> Tensor:
    """JetMoE's experts in place of an MLP: [batch, seq, embed] -> the same."""
    tokens = hidden.flatten(0, 1)
    _, ids, gates = _jetmoe_route(module.router, tokens)
    gate, up = _halves(expert_linear(tokens.unsqueeze(1), ids, module.input_linear.weight), -1)
    computed = expert_linear(module.activation(gate) * up, ids, module.output_linear.weight)
    return (computed * gates.unsqueeze(-1)).sum(1).view(hidden.shape) + module.bias


def _jetmoe_queries(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """JetMoE's experts in place of attention's query projection: [batch, seq, embed] -> ([batch, seq, top_k, columns],
    the router's logits, what `_jetmoe_outputs` needs of the routing)."""
    tokens = hidden.flatten(0, 1)
    logits, ids, gates = _jetmoe_route(module.router, tokens)
    queries = expert_linear(tokens.unsqueeze(1), ids, module.input_linear.weight)
    return queries.unflatten(0, hidden.shape[:2]), logits, (ids, gates)


def _jetmoe_outputs(module: Any, attended: Tensor, routing: tuple[Tensor, Tensor]) -> Tensor:
    """JetMoE's experts in place of attention's output projection: [batch, seq, top_k, columns] -> [batch, seq,
    embed]."""
    ids, gates = routing
    computed = expert_linear(attended.flatten(0, 1), ids, module.output_linear.weight)
    return (computed * gates.unsqueeze(-1)).sum(1).unflatten(0, attended.shape[:2]) + module.bias


def _jetmoe_route(router: Any, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The router's logits [tokens, experts], and the ids and gates [tokens, top_k] of each token's experts."""
    logits = router.layer(tokens).float()
    largest, ids = logits.topk(router.top_k, dim=1)
    return logits, ids, torch.softmax(largest, dim=1).type_as(tokens)


def _halves(packed: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The gates and the ups of a tensor that has both in one dim. Slices of a sharded dim can be exchanged between
    neighbours, where a split is gathered."""
    size = packed.shape[dim] // 2
    return packed.narrow(dim, 0, size), packed.narrow(dim, size, size)


_OWN: dict[str, dict[str, Callable[..., Any]]] = {
    "JetMoeMoA": {"map": _jetmoe_queries, "reduce": _jetmoe_outputs},
    "JetMoeMoE": {"forward": _jetmoe_mixture},
    "Llama4TextMoe": {"forward": _llama4},
    "LongcatFlashExperts": {"forward": _longcat},
}
"""For each class of module, its new methods."""
