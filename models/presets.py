"""What a model is made of, as plain numbers: no torch in here, so that a recipe can be checked at once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of rotary wavelengths (the "llama3" rope type): long ones by `factor`, short ones not."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """One transformer. Sizes are global: nothing here knows of devices."""

    family: str
    """`llama` (RMSNorm, rotary positions, SwiGLU) or `granite` (LayerNorm, learned positions, GELU: GPTBigCode)."""
    layers: int
    width: int
    """Size of the residual stream, the dim `embed`."""
    heads: int
    kv_heads: int
    """Key and value heads: `heads` for plain attention, fewer for grouped queries, 1 for multi-query."""
    head_dim: int
    """Size of a head; independent of width / heads."""
    mlp: int
    vocab: int
    max_seq: int
    """Longest sequence the positions are made for."""
    seq_len: int
    """Sequence length to train with where a recipe names none."""
    dtype: str = "bf16"
    """dtype of the computation where a recipe names none: fp32, bf16 or fp16."""
    tie_embeddings: bool = False
    """Whether the head multiplies by the embedding table instead of a matrix of its own."""
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    attention_bias: bool = False
    """Whether wq, wk, wv and wo add a bias."""
    mlp_bias: bool = False
    """Whether the linear layers of the MLP add a bias."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "head_dim", "mlp", "vocab", "max_seq", "seq_len"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"`{name}: {size!r}` is not a positive integer")
        if self.family not in FAMILIES:
            raise ValueError(f"there is no model family `{self.family}`; families: {', '.join(FAMILIES)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"`dtype: {self.dtype}` is not one of {', '.join(DTYPES)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly")
        if self.family == "llama" and self.head_dim % 2:
            raise ValueError(f"`head_dim: {self.head_dim}` is odd; rotary positions turn pairs")
        if self.family == "granite" and self.rope_scaling is not None:
            raise ValueError("the granite family has learned positions; `rope_scaling` has no meaning there")
        if not (self.norm_eps > 0 and self.rope_theta > 0):
            raise ValueError("`norm_eps` and `rope_theta` must be positive")

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        q, kv, d = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.width
        if self.family == "llama":
            up, norm, outside = 2 * self.mlp, d, 0
        else:
            up, norm, outside = self.mlp, 2 * d, self.max_seq * d
        layer = 2 * d * (q + kv) + d * (up + self.mlp) + 2 * norm
        layer += (q + 2 * kv + d if self.attention_bias else 0) + (up + d if self.mlp_bias else 0)
        tables = 1 if self.tie_embeddings else 2
        return self.layers * layer + outside + norm + tables * self.vocab * d


FAMILIES = ("llama", "granite")
DTYPES = ("fp32", "bf16", "fp16")

_LLAMA_31 = RopeScaling(factor=8.0)
_LLAMA_32 = RopeScaling(factor=32.0)

PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        "llama",
        layers=4,
        width=128,
        heads=8,
        kv_heads=4,
        head_dim=16,
        mlp=384,
        vocab=2048,
        max_seq=256,
        seq_len=256,
        dtype="fp32",
    ),
    "llama3-1b": ModelConfig(
        "llama",
        layers=16,
        width=2048,
        heads=32,
        kv_heads=8,
        head_dim=64,
        mlp=8192,
        vocab=128256,
        max_seq=131072,
        seq_len=8192,
        tie_embeddings=True,
        rope_theta=500000.0,
        rope_scaling=_LLAMA_32,
    ),
    "llama3-8b": ModelConfig(
        "llama",
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mlp=14336,
        vocab=128256,
        max_seq=131072,
        seq_len=8192,
        rope_theta=500000.0,
        rope_scaling=_LLAMA_31,
    ),
    "llama3-70b": ModelConfig(
        "llama",
        layers=80,
        width=8192,
        heads=64,
        kv_heads=8,
        head_dim=128,
        mlp=28672,
        vocab=128256,
        max_seq=131072,
        seq_len=8192,
        rope_theta=500000.0,
        rope_scaling=_LLAMA_31,
    ),
    "llama3-405b": ModelConfig(
        "llama",
        layers=126,
        width=16384,
        heads=128,
        kv_heads=8,
        head_dim=128,
        mlp=53248,
        vocab=128256,
        max_seq=131072,
        seq_len=8192,
        rope_theta=500000.0,
        rope_scaling=_LLAMA_31,
    ),
    "granite-tiny": ModelConfig(
        "granite",
        layers=4,
        width=128,
        heads=8,
        kv_heads=1,
        head_dim=16,
        mlp=512,
        vocab=2048,
        max_seq=256,
        seq_len=256,
        dtype="fp32",
        tie_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    ),
    "granite-20b": ModelConfig(
        "granite",
        layers=52,
        width=6144,
        heads=48,
        kv_heads=1,
        head_dim=128,
        mlp=24576,
        vocab=49152,
        max_seq=8192,
        seq_len=8192,
        tie_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    ),
    "granite-34b": ModelConfig(
        "granite",
        layers=88,
        width=6144,
        heads=48,
        kv_heads=1,
        head_dim=128,
        mlp=24576,
        vocab=49152,
        max_seq=8192,
        seq_len=8192,
        tie_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    ),
}

_NOT_YET = dict.fromkeys(("experts", "top_k"), "mixture-of-experts layers are not supported")


def preset(name: str, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The preset `name` with some of its numbers replaced; ValueError names what is unknown or does not fit.

    Halving `width` or `heads` alone leaves `head_dim` as it is: the three are independent.
    """
    if name not in PRESETS:
        raise ValueError(f"there is no model preset `{name}`{_similar(name, PRESETS)}; presets: {', '.join(PRESETS)}")
    return override(PRESETS[name], overrides or {})


def override(config: ModelConfig, overrides: Mapping[str, Any]) -> ModelConfig:
    """`config` with the fields in `overrides` replaced. `rope_scaling` may be None or a mapping of its four fields."""
    known = {f.name for f in fields(ModelConfig)} - {"family"}
    for key in overrides:
        if key in _NOT_YET:
            raise ValueError(f"`{key}`: {_NOT_YET[key]}")
        if key not in known:
            raise ValueError(f"a model has no number `{key}`{_similar(key, known)}; it has {', '.join(sorted(known))}")
    changes = dict(overrides)
    scaling = changes.get("rope_scaling")
    if isinstance(scaling, Mapping):
        try:
            changes["rope_scaling"] = RopeScaling(**scaling)
        except TypeError:
            wanted = ", ".join(f.name for f in fields(RopeScaling))
            raise ValueError(f"`rope_scaling` takes {wanted}, not {', '.join(map(str, scaling))}") from None
    return replace(config, **changes)


def _similar(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean `{close[0]}`?" if close else ""
