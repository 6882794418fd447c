"""tpshard's operations for transformers' modules: attention and mixtures of experts.

transformers looks both up by a name in the configuration. Registered under `NAME`, its modules compute with the same
operations as tpshard's families, and are sharded and priced like them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.kernels.attention.attention import attention
from tpshard.kernels.attention.attention_mask import visible
from tpshard.kernels.attention.paged_selection import selected_attention
from tpshard.kernels.experts.expert_linear import expert_linear
from tpshard.kernels.experts.experts import experts
from tpshard.models.transformers import chunked_attention

NAME = "tpshard"

_INDIFFERENT = {
    "documents", "position_ids", "position_embeddings", "cache_position", "use_cache", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep", "num_items_in_batch",
    "deterministic", "layer_idx",
}  # fmt: skip
"""Arguments that modules pass to attention and that do not change its result."""


def register() -> None:
    """Registers tpshard's attention and experts with transformers, under `NAME`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_EXPERTS_FUNCTIONS.register(NAME, route)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' modules call.

    query: [batch, heads, seq, head_dim], key and value: [batch, kv_heads, seq, head_dim] -> [batch, seq, heads,
    head_dim]. The mask follows from causality, the window, the `documents` [batch, seq] of the model's caller, and
    attention_mask: [batch or 1, heads or 1, seq, keys], bool (true if visible) or added to the scores.
    s_aux: [heads], the scores of attention sinks. indices: [batch, seq, selected], the keys that an indexer selects for
    each query; the mask hides all others.
    ValueError for arguments that the operation does not support.
    """
    for name, argument in others.items():
        if name not in _INDIFFERENT and argument is not None and argument is not False:
            raise ValueError(f"{type(module).__name__} asks attention for `{name}`, which is not supported")
    if dropout and module.training:
        raise ValueError(f"{type(module).__name__} uses attention dropout, which is not supported")
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    sliding_window = sliding_window or getattr(module, "tpshard_window", None)
    documents, step = others.get("documents"), getattr(module, "tpshard_step", None)
    if documents is None and step is not None:
        documents = step.documents
    chunk = getattr(module, chunked_attention.CHUNK, None)
    if chunk is not None and step is not None and query.shape[2] > chunk and step.longest is None:
        documents = chunked_attention.within_chunks(documents, step.positions, query, chunk)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
    if step is not None and step.longest is not None:
        if attention_mask is step.mask:
            attention_mask = None
        if indices is not None:
            named = {"attention_mask": attention_mask, "sliding_window": sliding_window, "softcap": softcap}
            asked = [f"`{name}`" for name, argument in named.items() if argument is not None]
            if asked := asked + ["no causality"] * (not causal):
                raise ValueError(
                    f"{type(module).__name__} asks attention to the keys that an indexer selects for "
                    f"{' and '.join(asked)}, which a server does not support"
                )
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            return selected_attention(q, k, v, indices, scale, s_aux), None
    if causal and attention_mask is None and indices is None:
        width = max(query.shape[-1], value.shape[-1])  # zeros change neither the scores nor the rest of a result
        q, k, v = (_pad(x, width).transpose(1, 2) for x in (query, key, value))
        return attention(q, k, v, documents, scale, sliding_window, softcap, s_aux)[..., : value.shape[-1]], None
    if indices is not None:
        attention_mask = _joined(attention_mask, _selected(indices, key.shape[2]))
    return _explicit_attention(
        query, key, value, attention_mask, documents, scale, sliding_window, softcap, causal, s_aux
    ), None


def explicit_mask(tokens: Tensor, documents: Tensor | None, window: int | None = None) -> Tensor:
    """The mask of causal attention within documents and a window: [batch, seq] each -> [batch, 1, seq, seq] bool, true
    if visible.

    transformers' modules with an indexer (DeepSeek-V3.2) select keys under this mask.
    """
    batch, seq = tokens.shape
    pair = None if documents is None else (documents, documents)
    return visible(pair, range(seq), range(seq), window, tokens.device).expand(batch, 1, seq, seq)


def _selected(indices: Tensor, keys: int) -> Tensor:
    """A mask [batch, 1, seq, keys] that shows only the keys of `indices` [batch, seq, selected]."""
    selected = indices.new_zeros((*indices.shape[:2], keys), dtype=torch.bool).scatter(-1, indices.long(), True)
    return selected.unsqueeze(1)


def _pad(x: Tensor, width: int) -> Tensor:
    """x with zeros after its last dim, up to `width`."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, documents: Tensor | None, scale: float,
    window: int | None, softcap: float | None, causal: bool, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention by torch under an explicit mask, or in plain operations with a softcap or sinks."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    rows, columns = range(query.shape[2]), range(key.shape[2])
    attended = None
    if causal:
        pair = None if documents is None else (documents, documents)
        attended = visible(pair, rows, columns, window, query.device)
    elif documents is not None and documents.shape[1] == len(rows) == len(columns):
        attended = (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)
    if not causal and window is not None:  # to both sides, the query's own position included
        places = [torch.arange(len(side), device=query.device) for side in (rows, columns)]
        mask = _joined(mask, ((places[0][:, None] - places[1]).abs() < window)[None, None])
    mask = _joined(mask, attended)
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale).transpose(1, 2)
    scores = (query @ key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        further = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, further], -1), -1)[..., :-1]
    return (weights.to(query.dtype) @ value).transpose(1, 2)


def _joined(mask: Tensor | None, attended: Tensor | None) -> Tensor | None:
    """Combines a mask (bool, or added to scores) with the visible keys (bool) into one mask; either may be None."""
    if mask is None or attended is None:
        return attended if mask is None else mask
    return mask.masked_fill(~attended, float("-inf")) if mask.is_floating_point() else mask & attended


def are_swiglu(module: Any) -> bool:
    """Whether a module holds SwiGLU experts without biases, which tpshard's operation computes."""
    from transformers.integrations.moe import _default_apply_gate

    if not hasattr(type(module), "_apply_gate"):
        return False
    plain = module.has_gate and module.is_concatenated and not (
        module.has_bias or module.is_transposed or module.has_post_expert_norm
    )  # fmt: skip
    plain = plain and type(module)._apply_gate is _default_apply_gate
    return plain and type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")


def route(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The experts function that transformers' modules call: hidden [tokens, width], ids and weights [tokens, top_k] ->
    [tokens, width]."""
    if are_swiglu(module):
        columns = module.gate_up_proj.shape[1] // 2
        gate, up = module.gate_up_proj[:, :columns], module.gate_up_proj[:, columns:]
        return experts(hidden, ids, weights, gate, up, module.down_proj)
    inward = "gate_up_proj" if module.has_gate else "up_proj"
    between = _times(module, inward, hidden.unsqueeze(1), ids)
    between = module._apply_gate(between) if module.has_gate else module.act_fn(between)
    out = _times(module, "down_proj", between, ids)
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    return (out * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _times(module: Any, name: str, x: Tensor, ids: Tensor) -> Tensor:
    """Rows [tokens, top_k or 1, inputs] times their experts' matrices of a name, plus their biases, if any."""
    weight = getattr(module, name)
    out = expert_linear(x, ids, weight.transpose(1, 2) if module.is_transposed else weight)
    return out + getattr(module, f"{name}_bias")[ids] if module.has_bias else out
