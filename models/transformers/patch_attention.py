"""tpshard's attention operation for classes that do not use transformers' attention interface, or use only part of it.

Bloom, MPT and some Falcons add to each score a slope per head times the key's position (ALiBi, Press et al. 2022).
These biases become extra columns of the keys, where the queries have ones.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.kernels.attention.attention import attention
from tpshard.models.transformers import chunked_attention, patch_indexers

_COLUMNS = 8
"""Extra columns per head for ALiBi: fast kernels need multiples of this."""


@dataclass
class Step:
    """The documents and positions, [batch, seq] each, of the tokens that a model computes; None between its calls."""

    documents: Tensor | None = None
    positions: Tensor | None = None
    length: int = 0
    """The number of tokens of the longest sequence."""
    longest: int | None = None
    """A server's `length`, whose rows are tokens of many sequences; None where rows are sequences."""
    cache: Any = None
    """transformers' cache with the states of recurrent layers, in a server."""
    mask: Tensor | None = None
    """The mask of causal attention [batch, 1, seq, seq] that a model got, if its modules select keys under one."""


def take_place(model: nn.Module, interface: str, hybrid: bool = False) -> Step:
    """Replaces the attention of the modules in `_OWN` by tpshard's operation, registered with transformers as
    `attention_interface`.

    hybrid: for a class with recurrent layers, also that of modules which use transformers' attention interface, though
    the class does not say so.

    Returns the `Step` that they read. All modules have it as `tpshard_step`, for layers that pass attention no
    `documents`.
    """
    step = Step()
    for module in model.modules():
        module.tpshard_step = step  # type: ignore[assignment]
        if hasattr(module, "layer_idx") and _calls_interface(module) and (window := _window_of_mask(model, module)):
            module.tpshard_window = window  # type: ignore[assignment]
        usual = _through_interface if hybrid and _calls_interface(module) else None
        replacements = _OWN.get(type(module).__name__, usual)
        for method, replacement in replacements(module, step, interface).items() if replacements else ():
            setattr(module, method, replacement)
    return step


def limit_length(model: nn.Module, longest: int) -> None:
    """Prepares a model for a server's steps, whose rows are tokens of sequences of at most `longest` tokens."""
    step = getattr(model, "tpshard_step", None)
    if step is not None:
        step.longest = longest
        patch_indexers.take_place(model)


def took_place(model: nn.Module) -> bool:
    """Whether `take_place` changed modules of the model."""
    return any(vars(module).keys() & {"forward", "_attn"} for module in model.modules() if module is not model)


Replacements = dict[str, Callable[..., Any]]
"""New methods of a module, by name."""


def _window_of_mask(model: Any, module: Any) -> int | None:
    """The sliding window of an attention whose class says it by the mask alone (Qwen2-MoE, Phi-3.5-MoE, Doge); others
    pass it on."""
    if not hasattr(sys.modules[type(model).__module__], "create_sliding_window_causal_mask"):
        return None
    if "sliding_window=" in inspect.getsource(inspect.unwrap(type(module).forward)):
        return None
    config = model.config.get_text_config()
    types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    slides = not types or types[module.layer_idx] == "sliding_attention"
    return window if slides else None


def _calls_interface(module: nn.Module) -> bool:
    """Whether a module calls transformers' attention interface, with a mask as its only bias."""
    code = inspect.unwrap(type(module).forward).__code__
    return "ALL_ATTENTION_FUNCTIONS" in code.co_names and "position_bias" not in code.co_varnames


def _through_interface(module: Any, step: Step, interface: str) -> Replacements:
    """The replacement for a class that calls transformers' interface, while the model says that it does not, or its
    layers pass on no `documents`."""
    module.config = copy.copy(module.config)
    module.config._attn_implementation = interface
    return {"forward": partial(_forward_without_mask, module)}


def _forward_without_mask(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, without the mask that transformers made for eager attention."""
    own = type(module).forward
    given = inspect.signature(own).bind(module, *args, **kwargs)
    given.arguments["attention_mask"] = None
    return own(*given.args, **given.kwargs)


def _written_out(module: Any, step: Step, _: str) -> Replacements:
    """The replacement for a class whose method `_attn` computes attention of [batch, heads, seq, head_dim]."""
    scale = 1.0 / float(getattr(module, "scale_attn", 1.0))
    window = module.config.window_size if getattr(module, "attention_type", "") == "local" else None

    def attend(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        q, k, v = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
        return attention(q, k, v, step.documents, scale, window).transpose(1, 2), None

    return {"_attn": attend}


def _falcon(module: Any, step: Step, _: str) -> Replacements:
    slopes = None
    if module.config.alibi:
        from transformers.models.falcon.modeling_falcon import build_alibi_tensor

        slopes = _slopes(build_alibi_tensor, module.num_heads).bfloat16()  # the class rounds slopes and products so
    return {"forward": partial(_falcon_forward, module, step, slopes)}


def _falcon_forward(
    module: Any,
    step: Step,
    slopes: Tensor | None,
    hidden_states: Tensor,
    *_: Any,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """Falcon's attention; hidden_states: [batch, seq, embed] -> the same; slopes: [heads], or None for rotary
    positions."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    q, k, v = _split_columns(module.query_key_value(hidden_states), module.num_heads, module.num_kv_heads)
    if slopes is None:
        assert position_embeddings is not None
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
        out = attention(q, k, v, step.documents)
    else:
        scale = float(module.inv_norm_factor)
        out = _alibi(q, k, v, step, lambda positions: (slopes.to(q.device) * positions).float() * scale, scale)
    return module.dense(out.flatten(2)), None


def _bloom(module: Any, step: Step, _: str) -> Replacements:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    return {"forward": partial(_bloom_forward, module, step, _slopes(build_alibi_tensor, module.num_heads))}


def _bloom_forward(
    module: Any, step: Step, slopes: Tensor, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Bloom's attention; hidden_states, residual: [batch, seq, embed] -> the same; slopes: [heads]"""
    q, k, v = _split_columns(module.query_key_value(hidden_states), module.num_heads, module.num_heads)
    scale = float(module.inv_norm_factor)
    out = _alibi(q, k, v, step, lambda positions: (slopes.to(q.device) * positions).to(q.dtype), scale)
    return residual + module.dense(out.flatten(2)), None


def _mpt(module: Any, step: Step, _: str) -> Replacements:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    with torch.device("cpu"):
        steps = build_mpt_alibi_tensor(module.n_heads, 2)[:, 0]  # [heads, 2], relative to the last position
    return {"forward": partial(_mpt_forward, module, step, steps[:, 1] - steps[:, 0])}


def _mpt_forward(module: Any, step: Step, slopes: Tensor, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    """MPT's attention; hidden_states: [batch, seq, embed] -> the same; slopes: [heads]"""
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    q, k, v = (part.unflatten(-1, (module.n_heads, -1)) for part in fused.chunk(3, dim=2))
    out = _alibi(q, k, v, step, lambda positions: slopes.to(q.device) * positions, float(module.softmax_scale))
    return module.out_proj(out.flatten(2)), None


def _llama4(module: Any, step: Step, _: str) -> Replacements:
    setattr(module, chunked_attention.CHUNK, chunked_attention.chunk_of(module.config, module.layer_idx))
    if module.attn_temperature_tuning and not module.use_rope:  # such layers do not normalize queries
        module.attn_temperature_tuning = False
        floor, scale = module.floor_scale, module.attn_scale
        module.q_proj.register_forward_hook(
            lambda _, __, query: chunked_attention.temper(step.positions, query, floor, scale)
        )
    return {}


def _slopes(build_alibi_tensor: Callable[[Tensor, int, torch.dtype], Tensor], heads: int) -> Tensor:
    """The ALiBi slopes [heads] that a class's own function computes."""
    with torch.device("cpu"):
        return build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), heads, torch.float32)[:, 0, 1]


def _alibi(q: Tensor, k: Tensor, v: Tensor, step: Step, bias_at: Callable[[Tensor], Tensor], scale: float) -> Tensor:
    """Attention with a bias per key and head, which `bias_at` computes for positions [batch, seq, 1]."""
    k, v = (x if x.shape[2] == q.shape[2] else x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    rows = q.shape[:2]
    positions = torch.arange(rows[1], device=q.device).expand(rows) if step.positions is None else step.positions
    bias = bias_at(positions[..., None]).float() / scale  # [batch, seq, heads]
    coarse = bias.to(q.dtype)  # in bf16 two columns hold twice as many digits
    d, columns = q.shape[-1], torch.stack([coarse, (bias - coarse.float()).to(q.dtype)], -1)
    ones = F.pad(torch.ones(2, dtype=q.dtype, device=q.device), (d, _COLUMNS - 2))
    q, k, v = (F.pad(x, (0, _COLUMNS)) for x in (q, k, v))
    k = k + F.pad(columns, (d, _COLUMNS - 2))
    return attention(q + ones, k, v, step.documents, scale)[..., :d]


def _split_columns(fused: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Splits [batch, seq, columns], ordered by KV head, into queries, keys and values [batch, seq, heads, head_dim]."""
    each = heads // kv_heads + 2
    parts = fused.unflatten(-1, (kv_heads, each, -1))
    return parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]


_OWN: dict[str, Callable[[Any, Step, str], Replacements]] = {
    "BloomAttention": _bloom,
    "CodeGenAttention": _written_out,
    "FalconAttention": _falcon,
    "GPTJAttention": _written_out,
    "GPTNeoSelfAttention": _written_out,
    "Llama4TextAttention": _llama4,
    "MptAttention": _mpt,
    "NemotronAttention": _through_interface,
    "StableLmAttention": _through_interface,
}
"""For each class of module, its new methods."""
