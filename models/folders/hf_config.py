"""Conversion between config.json and ModelConfig. Settings that change the logits and are unsupported are refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpshard.models.families.catalog import FAMILIES
from tpshard.models.families.config import ModelConfig, RopeScaling
from tpshard.models.families.family import Family, Key, Weight, Windows
from tpshard.models.folders import hf_json
from tpshard.models.folders.foreign_formats import refuse_format, refuse_quantization
from tpshard.models.folders.module_folder import refuse_module

DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_SLIDING, _FULL = "sliding_attention", "full_attention"
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


class OtherForm(ValueError):
    """A setting that a family lacks and that transformers' class of the same name computes."""


def folder_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """The configuration of a folder's model, dense or quantized. Errors as in `read_raw` and `read_config`."""
    return read_config(read_raw(folder), quantized=True)


def computes(folder: str | os.PathLike[str]) -> bool:
    """Whether a family of tpshard computes a folder's model, and not transformers' class; `read_config` may still
    refuse its numbers. FolderError for the folder of a user's module."""
    raw = read_raw(folder)
    refuse_module(raw, folder)
    return not class_reason(raw)


def class_reason(raw: Mapping[str, Any]) -> str:
    """Why transformers' class computes the model of a config.json, and no family of tpshard; "" where one does."""
    kind = raw.get("model_type")
    if "architectures" not in raw:
        return ""
    if kind not in _BY_TYPE:
        return f"tpshard has no family for {kind}"
    try:
        read_config(raw, quantized=True)
    except OtherForm as error:
        return f"tpshard's family {_BY_TYPE[kind].name} lacks this: {error}"
    except ValueError:  # told by whoever reads the configuration
        pass
    return ""


def read_raw(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of a folder's config.json. ValueError where the folder or the file is missing, or where the file
    asks to run code."""
    path = Path(folder)
    refuse_format(path)
    if not (path / "config.json").exists():
        there = path.is_dir()
        raise ValueError(f"{path} holds no config.json" if there else f"{path} is not a folder on this machine")
    raw = hf_json.read_json(path, "config.json")
    hf_json.refuse_code(raw, path / "config.json")
    refuse_quantization(raw, path / "config.json")
    kind = raw.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise ValueError(f"config.json: `model_type: {_short(kind)}` is not the name of a type")
    _refuse_huge(raw, "")
    return raw


def _refuse_huge(value: Any, key: str) -> None:
    """Raises ValueError for an integer beyond 64 bits, which no tensor's shape or index can have."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"config.json: `{key}: {_short(value)}` has more than 64 bits")
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        _refuse_huge(item, f"{key}.{name}" if key else f"{name}")


def read_config(raw: Mapping[str, Any], *, quantized: bool = False) -> ModelConfig:
    """The model that a config.json describes, in the keys of transformers 4 or 5.

    (`torch_dtype`, `rope_theta` and `rope_scaling`, or `dtype` and `rope_parameters`.) ValueError names what is
    unsupported, missing or contradictory. With `quantized` a `quantization_config` is allowed, which the caller
    handles.
    """
    kind = raw.get("model_type")
    if kind not in _BY_TYPE:
        *others, last = _BY_TYPE
        raise ValueError(f"config.json: `model_type: {kind}` is not supported; {', '.join(others)} and {last} are")
    family = _BY_TYPE[kind]
    family_keys = {name for key in family.hf.keys for name in (key.theirs, key.alias)}
    family_keys |= {"sliding_window"} if family.hf.windows is not None else set()
    for key, harmless in _UNSUPPORTED.items():
        if key not in family_keys and raw.get(key) not in harmless and not (quantized and key == "quantization_config"):
            kind_of_error = OtherForm if key == "partial_rotary_factor" else ValueError
            raise kind_of_error(f"config.json: `{key}: {_short(raw[key])}` is not supported")
    try:
        return _read(raw, family)
    except ValueError as error:
        raise (OtherForm if isinstance(error, OtherForm) else ValueError)(f"config.json: {error}") from error


def _read(raw: Mapping[str, Any], family: Family) -> ModelConfig:
    for fixed, allowed in family.hf.fixed.items():
        if raw.get(fixed, allowed[0]) not in allowed:
            raise OtherForm(f"`{fixed}: {_short(raw[fixed])}` is not supported; {', '.join(map(str, allowed))} is")
    numbers: dict[str, Any] = {"dtype": _dtype(raw), "vocab": _size(raw, "vocab_size")}
    for key in family.hf.keys:
        name = key.alias if key.alias in raw and key.theirs not in raw else key.theirs
        value = _READERS[key.kind](raw, name, _default(key, name, raw, numbers))
        numbers[key.ours] = value if key.read is None else key.read(value, numbers)
    numbers |= {ours: follows(numbers) for ours, follows in family.hf.derived.items()}
    if family.positions == "rotary":
        numbers["rope_theta"], numbers["rope_scaling"] = _rope(raw, numbers["max_seq"], family.hf.theta)
    if family.hf.windows is not None:
        numbers |= _windows(raw, numbers["layers"], family.hf.windows)
    if family.hf.pads:
        numbers["pad_token"] = _pad_token(raw, numbers["vocab"])
    return ModelConfig(family.name, **numbers, seq_len=min(numbers["max_seq"], 8192))


def _pad_token(raw: Mapping[str, Any], vocab: int) -> int | None:
    """The id of padding; a negative one counts from the end of the vocabulary, as in torch's embedding."""
    value = raw.get("pad_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not -vocab <= value < vocab:
        raise ValueError(f"`pad_token_id: {_short(value)}` is none of {vocab} tokens")
    return value % vocab


def _default(key: Key, name: str, raw: Mapping[str, Any], numbers: Mapping[str, Any]) -> Any:
    """The value that a missing or null key of config.json stands for; None, without computing it, if the key is set."""
    if raw.get(name) is not None:
        return None
    default = key.null if name in raw and key.null is not None else key.default
    return default(numbers) if callable(default) else default


def _windows(raw: Mapping[str, Any], layers: int, described: Windows) -> dict[str, Any]:
    """Reads the fields `window` and `full_layers` from the keys of a config.json."""
    window = _size(raw, "sliding_window") if raw.get("sliding_window") is not None else None
    window = window if "sliding_window" in raw else described.default
    if described.switch and not _flag(raw, "use_sliding_window", False):
        window = None
    if described.first is None:
        return {"window": window}
    first = raw.get("max_window_layers", described.first)
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = [_SLIDING if window is not None and i >= first else _FULL for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {_SLIDING, _FULL}:
        raise ValueError(f"`layer_types: {_short(kinds)}` must be {_SLIDING} or {_FULL} for each of {layers} layers")
    if window is None and _SLIDING in kinds:
        raise ValueError(f"`layer_types` has {_SLIDING}, but no `sliding_window` is in use")
    full = tuple(i for i, kind in enumerate(kinds) if kind == _FULL)
    return {"window": window, "full_layers": full} if len(full) < layers else {}


def _rope(raw: Mapping[str, Any], max_seq: int, theta: float) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from the old or the new keys, or from both where they agree."""
    sources = []
    for key in ("rope_scaling", "rope_parameters"):
        values = raw.get(key)
        if values is None:
            continue
        if not isinstance(values, Mapping):
            raise ValueError(f"`{key}: {_short(values)}` is not an object")
        sources.append((_number({**raw, **values}, "rope_theta", theta), _scaling(key, values, max_seq)))
    if len(sources) == 2 and sources[0] != sources[1]:
        raise ValueError("`rope_scaling` and `rope_parameters` contradict each other")
    return sources[0] if sources else (_number(raw, "rope_theta", theta), None)


def _scaling(key: str, values: Mapping[str, Any], max_seq: int) -> RopeScaling | None:
    kind = values.get("rope_type", values.get("type", "default"))
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise OtherForm(f"`{key}.partial_rotary_factor: {values['partial_rotary_factor']}` is not supported")
    if kind in (None, "default"):
        if any(isinstance(value, Mapping) for value in values.values()):
            raise OtherForm(f"`{key}` differs from layer to layer, which is not supported")
        return None
    if kind != "llama3":
        raise OtherForm(f"`{key}.rope_type: {_short(kind)}` is not supported; default and llama3 are")
    original = _size(values, "original_max_position_embeddings", max_seq)
    factor, low, high = (_number(values, name, None) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if not high > low:
        raise ValueError(f"`{key}.high_freq_factor: {high}` is not above `low_freq_factor: {low}`")
    return RopeScaling(factor, low, high, original)


def write_config(c: ModelConfig, dtype: str, others: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A config.json that both generations of transformers read. dtype: that of the tensors, fp32, bf16 or fp16.

    others: further entries, such as the ids of special tokens, or the config.json of the folder that the model came
    from; what describes the computation is replaced. ValueError if no architecture of transformers can represent the
    model.
    """
    theirs = {ours: name for name, ours in DTYPE_NAMES.items()}[dtype]
    hf = c.family_entry.hf
    hf.check(c)
    own = {key.theirs: getattr(c, key.ours) if key.write is None else key.write(c) for key in hf.keys}
    fixed = {key: allowed[0] for key, allowed in hf.fixed.items()}
    kind = {"architectures": [hf.architecture], "model_type": hf.model_type}
    rope = _rope_to_json(c) if c.family_entry.positions == "rotary" else {}
    windows = _windows_to_json(c, hf.windows) if hf.windows is not None else {}
    described = {
        "vocab_size": c.vocab,
        "dtype": theirs,
        "torch_dtype": theirs,
        **kind,
        **own,
        **fixed,
        **rope,
        **windows,
    }
    stale = {"quantization_config", "auto_map", "rope_theta", "rope_scaling", "rope_parameters"}
    stale |= {key.alias for key in hf.keys}
    new: dict[str, Any] = {"initializer_range": 0.02, "use_cache": True, **hf.written}
    return {
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **({} if "model_type" in (others or {}) else new),  # a key that a folder lacks stands for its class's default
        **{key: value for key, value in (others or {}).items() if key not in stale},
        **described,
    }


def _windows_to_json(c: ModelConfig, described: Windows) -> dict[str, Any]:
    entries: dict[str, Any] = {"sliding_window": c.window}
    if described.switch:
        entries["use_sliding_window"] = c.window is not None
    if described.first is not None:
        kinds = [_FULL if c.window_of(i) is None else _SLIDING for i in range(c.layers)]
        entries |= {"layer_types": kinds, "max_window_layers": kinds.index(_SLIDING) if _SLIDING in kinds else c.layers}
    return entries


def _rope_to_json(c: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if c.rope_scaling is not None:
        numbers = asdict(c.rope_scaling)
        original = numbers.pop("original_max_seq")
        rope = {"rope_type": "llama3", **numbers, "original_max_position_embeddings": original}
    return {
        "rope_theta": c.rope_theta,
        "rope_scaling": rope if c.rope_scaling is not None else None,
        "rope_parameters": {**rope, "rope_theta": c.rope_theta},
    }


def _dtype(raw: Mapping[str, Any]) -> str:
    value = raw.get("dtype", raw.get("torch_dtype"))
    name = "float32" if value is None else str(value).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise ValueError(f"`dtype: {name}` is not supported; {', '.join(DTYPE_NAMES)} are")
    return DTYPE_NAMES[name]


def _value(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"`{key}` is missing")
    return value


def _size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _value(raw, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
        raise ValueError(f"`{key}: {_short(value)}` is not a positive integer below 2^31")
    return value


def _weight(raw: Mapping[str, Any], key: str, default: float | None) -> float:
    value = _value(raw, key, default)
    return 0.0 if value == 0 and not isinstance(value, bool) else _number(raw, key, default)


def _number(raw: Mapping[str, Any], key: str, default: float | None) -> float:
    value = _value(raw, key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"`{key}: {_short(value)}` is not a positive number")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str, default: bool | None) -> bool:
    value = _value(raw, key, default)
    if not isinstance(value, bool):
        raise ValueError(f"`{key}: {_short(value)}` is neither true nor false")
    return value


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


_READERS: dict[type, Callable[..., Any]] = {int: _size, float: _number, Weight: _weight, bool: _flag}
_BY_TYPE = {family.hf.model_type: family for family in FAMILIES.values()}
