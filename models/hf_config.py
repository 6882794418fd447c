"""config.json and ModelConfig, both ways. What would change the logits and is not computed here is refused by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpshard.models import hf_json
from tpshard.models.presets import ModelConfig, RopeScaling

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_UNSUPPORTED = {  # key -> the values that change nothing
    "sliding_window": (None,),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
    "n_routed_experts": (None, 0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "partial_rotary_factor": (None, 1, 1.0),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "add_cross_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "quantization_config": (None,),
    "no_rope_layers": (None,),
    "adapter": (None,),
}


def folder_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """The model in a folder, dense or quantized, from its config.json alone. Errors as `read_raw` and `read_config`."""
    return read_config(read_raw(folder), quantized=True)


def read_raw(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """config.json of a folder as it stands. ValueError if there is none or it asks for code to be run."""
    path = Path(folder)
    if not (path / "config.json").exists():
        raise ValueError(f"{path} holds no config.json")
    raw = hf_json.read_json(path, "config.json")
    hf_json.refuse_code(raw, path / "config.json")
    return raw


def read_config(raw: Mapping[str, Any], *, quantized: bool = False) -> ModelConfig:
    """The model that a config.json describes, of either generation (`torch_dtype`, `rope_theta` and `rope_scaling`, or
    `dtype` and `rope_parameters`). ValueError names what is not supported, missing or contradictory.

    With `quantized` a `quantization_config` is allowed: the caller sees to it.
    """
    kind = raw.get("model_type")
    if kind not in ("llama", "gpt_bigcode"):
        raise ValueError(f"config.json: `model_type: {kind}` is not supported; llama and gpt_bigcode are")
    for key, harmless in _UNSUPPORTED.items():
        if raw.get(key) not in harmless and not (quantized and key == "quantization_config"):
            raise ValueError(f"config.json: `{key}: {_short(raw[key])}` is not supported")
    try:
        return _read_llama(raw) if kind == "llama" else _read_bigcode(raw)
    except ValueError as error:
        raise ValueError(f"config.json: {error}".replace("config.json: config.json: ", "config.json: ")) from error


def _read_llama(raw: Mapping[str, Any]) -> ModelConfig:
    _only(raw, "hidden_act", ("silu", "swish"), "silu")
    heads = _size(raw, "num_attention_heads")
    width = _size(raw, "hidden_size")
    head_dim = raw.get("head_dim")
    if head_dim is None:
        if width % heads:
            raise ValueError(f"`hidden_size: {width}` is not a multiple of {heads} heads and there is no `head_dim`")
        head_dim = width // heads
    max_seq = _size(raw, "max_position_embeddings", 2048)
    theta, scaling = _rope(raw, max_seq)
    kv_heads = raw.get("num_key_value_heads")
    return ModelConfig(
        "llama",
        layers=_size(raw, "num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        mlp=_size(raw, "intermediate_size"),
        vocab=_size(raw, "vocab_size"),
        max_seq=max_seq,
        seq_len=min(max_seq, 8192),
        dtype=_dtype(raw),
        tie_embeddings=_flag(raw, "tie_word_embeddings", False),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        attention_bias=_flag(raw, "attention_bias", False),
        mlp_bias=_flag(raw, "mlp_bias", False),
    )


def _read_bigcode(raw: Mapping[str, Any]) -> ModelConfig:
    _only(raw, "activation_function", ("gelu_pytorch_tanh", "gelu_new"), "gelu_pytorch_tanh")
    _only(raw, "scale_attn_weights", (True,), True)
    heads, width = _size(raw, "n_head"), _size(raw, "n_embd")
    if width % heads:
        raise ValueError(f"`n_embd: {width}` is not a multiple of {heads} heads")
    max_seq = _size(raw, "n_positions", 1024)
    inner = raw.get("n_inner")
    return ModelConfig(
        "granite",
        layers=_size(raw, "n_layer"),
        width=width,
        heads=heads,
        kv_heads=1 if _flag(raw, "multi_query", True) else heads,
        head_dim=width // heads,
        mlp=4 * width if inner is None else inner,
        vocab=_size(raw, "vocab_size"),
        max_seq=max_seq,
        seq_len=min(max_seq, 8192),
        dtype=_dtype(raw),
        tie_embeddings=_flag(raw, "tie_word_embeddings", True),
        norm_eps=_number(raw, "layer_norm_epsilon", 1e-5),
        attention_bias=True,
        mlp_bias=True,
    )


def _rope(raw: Mapping[str, Any], max_seq: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from either generation, or from both where they agree."""
    found = []
    for key in ("rope_scaling", "rope_parameters"):
        values = raw.get(key)
        if values is None:
            continue
        if not isinstance(values, Mapping):
            raise ValueError(f"`{key}: {_short(values)}` is not an object")
        found.append((_number({**raw, **values}, "rope_theta", 10000.0), _scaling(key, values, max_seq)))
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError("`rope_scaling` and `rope_parameters` contradict each other")
    return found[0] if found else (_number(raw, "rope_theta", 10000.0), None)


def _scaling(key: str, values: Mapping[str, Any], max_seq: int) -> RopeScaling | None:
    kind = values.get("rope_type", values.get("type", "default"))
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"`{key}.partial_rotary_factor: {values['partial_rotary_factor']}` is not supported")
    if kind in (None, "default"):
        if any(isinstance(value, Mapping) for value in values.values()):
            raise ValueError(f"`{key}` differs from layer to layer, which is not supported")
        return None
    if kind != "llama3":
        raise ValueError(f"`{key}.rope_type: {kind}` is not supported; default and llama3 are")
    original = _size(values, "original_max_position_embeddings", max_seq)
    factor, low, high = (_number(values, name, None) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if not high > low:
        raise ValueError(f"`{key}.high_freq_factor: {high}` is not above `low_freq_factor: {low}`")
    return RopeScaling(factor, low, high, original)


def write_config(c: ModelConfig, dtype: str, tokens: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A config.json that readers of both generations understand. dtype: fp32, bf16 or fp16, of the tensors.

    tokens: `bos_token_id`, `eos_token_id` and the like, null where left out. ValueError if no architecture that
    transformers has can hold the model.
    """
    theirs = {ours: name for name, ours in _DTYPES.items()}[dtype]
    shared: dict[str, Any] = {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **(tokens or {}),
        "dtype": theirs,
        "torch_dtype": theirs,
        "initializer_range": 0.02,
        "tie_word_embeddings": c.tie_embeddings,
        "use_cache": True,
        "vocab_size": c.vocab,
    }
    return shared | (_write_llama(c) if c.family == "llama" else _write_bigcode(c))


def _write_llama(c: ModelConfig) -> dict[str, Any]:
    if c.width % c.heads:
        raise ValueError(
            f"transformers wants a width that the heads divide, even beside `head_dim`: {c.width}, {c.heads}"
        )
    rope: dict[str, Any] = {"rope_type": "default"}
    if c.rope_scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": c.rope_scaling.factor,
            "low_freq_factor": c.rope_scaling.low_freq_factor,
            "high_freq_factor": c.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": c.rope_scaling.original_max_seq,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": c.attention_bias,
        "attention_dropout": 0.0,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.width,
        "intermediate_size": c.mlp,
        "max_position_embeddings": c.max_seq,
        "mlp_bias": c.mlp_bias,
        "num_attention_heads": c.heads,
        "num_hidden_layers": c.layers,
        "num_key_value_heads": c.kv_heads,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": rope if c.rope_scaling is not None else None,
        "rope_parameters": {**rope, "rope_theta": c.rope_theta},
    }


def _write_bigcode(c: ModelConfig) -> dict[str, Any]:
    if c.heads * c.head_dim != c.width:
        raise ValueError(f"gpt_bigcode needs heads * head_dim equal to the width: {c.heads} * {c.head_dim}, {c.width}")
    if c.kv_heads not in (1, c.heads):
        raise ValueError(f"gpt_bigcode has one KV head or one a head, not {c.kv_heads} of {c.heads}")
    if not (c.attention_bias and c.mlp_bias):
        raise ValueError("gpt_bigcode has biases; a granite without them cannot be written")
    return {
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        "activation_function": "gelu_pytorch_tanh",
        "add_cross_attention": False,
        "attention_softmax_in_fp32": True,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "layer_norm_epsilon": c.norm_eps,
        "multi_query": c.kv_heads == 1,
        "n_embd": c.width,
        "n_head": c.heads,
        "n_inner": c.mlp,
        "n_layer": c.layers,
        "n_positions": c.max_seq,
        "resid_pdrop": 0.0,
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
    }


def _dtype(raw: Mapping[str, Any]) -> str:
    value = raw.get("dtype", raw.get("torch_dtype"))
    name = "float32" if value is None else str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"`dtype: {name}` is not supported; {', '.join(_DTYPES)} are")
    return _DTYPES[name]


def _size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"`{key}` is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`{key}: {_short(value)}` is not a positive integer")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float | None) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"`{key}` is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"`{key}: {_short(value)}` is not a positive number")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ValueError(f"`{key}: {_short(value)}` is neither true nor false")
    return value


def _only(raw: Mapping[str, Any], key: str, allowed: tuple[Any, ...], default: Any) -> None:
    value = raw.get(key, default)
    if value not in allowed:
        raise ValueError(f"`{key}: {_short(value)}` is not supported; {', '.join(map(str, allowed))} is")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
