"""Presets: named models as plain numbers. The module needs no torch, so that recipes are checked quickly."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from tpshard.models.families.config import Contradiction, ModelConfig, RopeScaling

_LLAMA_3 = ModelConfig(
    "llama", layers=32, width=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128256, max_seq=131072,
    seq_len=8192, rope_theta=500000.0, rope_scaling=RopeScaling(factor=8.0),
)  # fmt: skip
_QWEN_3 = ModelConfig(
    "qwen3", layers=36, width=2560, heads=32, kv_heads=8, head_dim=128, mlp=9728, vocab=151936, max_seq=40960,
    seq_len=8192, rope_theta=1e6, norm_eps=1e-6, tie_embeddings=True,
)  # fmt: skip
_GRANITE = ModelConfig(
    "granite", layers=52, width=6144, heads=48, kv_heads=1, head_dim=128, mlp=24576, vocab=49152, max_seq=8192,
    seq_len=8192, tie_embeddings=True, attention_bias=True, mlp_bias=True,
)  # fmt: skip
_TINY: dict[str, Any] = {
    "layers": 4, "width": 128, "heads": 8, "head_dim": 16, "vocab": 2048, "max_seq": 256, "seq_len": 256,
    "dtype": "fp32",
}  # fmt: skip

PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig("llama", **_TINY, kv_heads=4, mlp=384),
    "llama3-1b": replace(
        _LLAMA_3, layers=16, width=2048, head_dim=64, mlp=8192, tie_embeddings=True,
        rope_scaling=RopeScaling(factor=32.0),
    ),
    "llama3-8b": _LLAMA_3,
    "llama3-70b": replace(_LLAMA_3, layers=80, width=8192, heads=64, mlp=28672),
    "llama3-405b": replace(_LLAMA_3, layers=126, width=16384, heads=128, mlp=53248),
    "tiny-moe": ModelConfig(
        "moe", **_TINY, kv_heads=4, mlp=128, experts=8, top_k=2, shared_experts=1, routing="sigmoid",
        balance="bias", balance_rate=0.01,
    ),
    "mixtral-8x7b": ModelConfig(
        "mixtral", layers=32, width=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=32000, max_seq=32768,
        seq_len=8192, rope_theta=1e6, experts=8, top_k=2, balance="loss", balance_rate=0.02 * 2 / 32,
    ),
    "qwen3-0.6b": replace(_QWEN_3, layers=28, width=1024, heads=16, mlp=3072),
    "qwen3-4b": _QWEN_3,
    "qwen3-30b-a3b": ModelConfig(
        "qwen3_moe", layers=48, width=2048, heads=32, kv_heads=4, head_dim=128, mlp=768, vocab=151936, max_seq=40960,
        seq_len=8192, rope_theta=1e6, norm_eps=1e-6, experts=128, top_k=8, balance="loss", balance_rate=0.001 * 8 / 48,
    ),
    "granite-tiny": replace(_GRANITE, **_TINY, mlp=512),
    "granite-20b": _GRANITE,
    "granite-34b": replace(_GRANITE, layers=88),
}  # fmt: skip


def preset(name: str, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The preset `name` with `overrides` applied. ValueError names what is unknown or contradictory.

    Halving only `width` or `heads` does not change `head_dim`: the three are independent.
    """
    if name not in PRESETS:
        raise ValueError(f"there is no model preset `{name}`{_similar(name, PRESETS)}; presets: {', '.join(PRESETS)}")
    return override(PRESETS[name], overrides or {})


def override(config: ModelConfig, overrides: Mapping[str, Any]) -> ModelConfig:
    """`config` with fields replaced by `overrides`. `rope_scaling` may be None or a mapping of its four fields."""
    names = {f.name for f in fields(ModelConfig)} - {"family"}
    for key in overrides:
        if key not in names:
            choices = f"it has {', '.join(sorted(names))}"
            raise ValueError(f"a model's configuration has no field `{key}`{_similar(key, names)}; {choices}")
    changes = dict(overrides)
    scaling = changes.get("rope_scaling")
    if isinstance(scaling, Mapping):
        try:
            changes["rope_scaling"] = RopeScaling(**scaling)
        except TypeError:
            choices = ", ".join(f.name for f in fields(RopeScaling))
            received = ", ".join(map(str, scaling))
            raise ValueError(f"`rope_scaling` has the keys {choices}, not {received}") from None
    return replace(config, **changes)


def override_folder(config: ModelConfig, overrides: Mapping[str, Any], folder: str) -> ModelConfig:
    """`override` for a folder with weights. ValueError where parameters would have other shapes, or others
    exist; the vocabulary may be larger."""
    changed = override(config, overrides)
    if changed.vocab < config.vocab:
        raise Contradiction(f"`vocab: {changed.vocab}` is less than the {config.vocab} tokens of {folder}", "vocab")
    shapes, stored = changed.shapes, replace(config, vocab=changed.vocab).shapes
    if shapes != stored:
        first = min(name for name in {*shapes, *stored} if shapes.get(name) != stored.get(name))
        message = f"the overrides {', '.join(overrides)} do not fit the weights in {folder}: {first}"
        raise Contradiction(message, *overrides)
    return changed


def _similar(name: str, names: Any) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f", did you mean `{close[0]}`?" if close else ""
