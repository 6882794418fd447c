"""tpshard's attention operation for classes without transformers' attention interface: Falcon and Bloom.

Bloom adds to each score a slope per head times the key's position (ALiBi, Press et al. 2022). That is a product too:
queries get extra columns with the slope, keys get extra columns with their position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.kernels.attention import attention

_EXACT = 256
"""Integers up to this are exact in bf16: a position is written as a multiple of it, and the rest."""
_COLUMNS = 8
"""Extra columns per head for positions: fast kernels need multiples of this."""


@dataclass
class Step:
    """The tokens' documents and positions, as given by the model's caller, [batch, seq] each."""

    documents: Tensor | None = None
    positions: Tensor | None = None


def take_place(model: nn.Module) -> Step | None:
    """Replaces the attention of Falcon's and Bloom's modules by tpshard's operation.

    Returns the `Step` that they read, or None if the model has no such modules.
    """
    step, replaced = Step(), False
    for module in model.modules():
        forward = _OWN.get(type(module).__name__)
        replacement = None if forward is None else forward(module, step)
        if replacement is not None:
            module.forward, replaced = replacement, True
    return step if replaced else None


def took_place(model: nn.Module) -> bool:
    """Whether `take_place` changed modules of the model."""
    return any("forward" in vars(module) for module in model.modules())


def _falcon(module: Any, step: Step) -> Callable[..., Any] | None:
    return None if module.config.alibi else partial(_falcon_forward, module, step)


def _falcon_forward(
    module: Any, step: Step, hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any
) -> tuple[Tensor, None]:
    """hidden_states: [batch, seq, embed] -> the same"""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    q, k, v = _split_columns(module.query_key_value(hidden_states), module.num_heads, module.num_kv_heads)
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
    return module.dense(attention(q, k, v, step.documents).flatten(2)), None


def _bloom(module: Any, step: Step) -> Callable[..., Any]:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    with torch.device("cpu"):
        slopes = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), module.num_heads, torch.float32)[:, 0, 1:]
        steep = (slopes / module.inv_norm_factor).expand(-1, 2)
        return partial(_bloom_forward, module, step, F.pad(steep, (module.head_dim, _COLUMNS - 2)))


def _bloom_forward(
    module: Any, step: Step, steep: Tensor, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """hidden_states, residual: [batch, seq, embed] -> the same; steep: [heads, head_dim and columns more]"""
    q, k, v = _split_columns(module.query_key_value(hidden_states), module.num_heads, module.num_heads)
    d, scale = q.shape[-1], float(module.inv_norm_factor)
    at = torch.arange(q.shape[1], device=q.device).expand(q.shape[:2]) if step.positions is None else step.positions
    coarse = at // _EXACT * _EXACT
    places = F.pad(torch.stack([coarse, at - coarse], -1).to(q.dtype), (d, _COLUMNS - 2))
    q, k, v = (F.pad(x, (0, _COLUMNS)) for x in (q, k, v))
    out = attention(q + steep.to(q.device, q.dtype), k + places[:, :, None], v, step.documents, scale)[..., :d]
    return residual + module.dense(out.flatten(2)), None


def _split_columns(fused: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Splits [batch, seq, columns], ordered by KV head, into queries, keys and values [batch, seq, heads, head_dim]."""
    each = heads // kv_heads + 2
    parts = fused.unflatten(-1, (kv_heads, each, -1))
    return parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]


_OWN: dict[str, Callable[[Any, Step], Callable[..., Any] | None]] = {
    "FalconAttention": _falcon,
    "BloomAttention": _bloom,
}
"""For each class of module, its new forward; None to leave it unchanged."""
