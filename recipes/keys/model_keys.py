"""The keys below `model`: which model a recipe computes, and its dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from tpshard.models.families.presets import PRESETS
from tpshard.recipes.keys.constraints import Computed, Count, CountOrZero, Positive, form, limits
from tpshard.recipes.text.section import Section, derived

if TYPE_CHECKING:
    Preset = str
else:
    Preset = Literal[tuple(PRESETS)]


class RopeScalingSection(Section):
    """Llama 3's scaling of rotary wavelengths: long ones grow by `factor`, short ones stay."""

    factor: Annotated[float, limits(least=1, most=1e6)]
    """Factor of the long wavelengths."""
    low_freq_factor: Positive = 1.0
    """Wavelengths above original_max_seq / this grow by the whole factor."""
    high_freq_factor: Positive = 4.0
    """Wavelengths below original_max_seq / this do not change."""
    original_max_seq: Count = 8192
    """Longest sequence without scaling."""


class Model(Section):
    """The model that is trained and served. Exactly one of `preset`, `hf`, `transformers` and `module`; the other keys
    change its dimensions.
    """

    exclusive: ClassVar[tuple[str, ...]] = ("preset", "hf", "transformers", "module")
    paths: ClassVar[tuple[str, ...]] = ("hf", "transformers")
    folders: ClassVar[tuple[str, ...]] = ("hf", "transformers")
    of_all: ClassVar[tuple[str, ...]] = ("seq_len", "dtype")
    """Keys that stay where a layer names the model by another key."""

    preset: Preset | None = None
    """The name of a model. tiny: 4 layers, width 128, 8 heads, 4 KV heads, mlp 384, vocab 2048, seq_len 256, fp32."""
    hf: str | None = None
    """A folder in Hugging Face format (config.json and safetensors), or a model of the hub, hf:OWNER/NAME or
    hf:OWNER/NAME@REVISION, which is kept where Hugging Face's library keeps it. Only JSON and safetensors are fetched,
    the weights where a command reads them."""
    transformers: str | None = None
    """A folder as `hf`, with or without safetensors, whose model transformers' own class computes."""
    dims: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    """Dim names by parameter pattern, for `transformers` and `module`, in addition to the class's; null: left to
    propagation."""
    module: Annotated[str, form(r"[\w.]+:[\w.]+", "package:Class")] | None = None
    """Your own module, as package:Class."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `module`."""
    seq_len: Annotated[int, limits(least=1, most=2**26)] = derived(
        default="the preset's: 256 for tiny ones, 8192 for others; else 2048"
    )
    """Tokens per sequence."""
    dtype: Computed = derived(default="the preset's: fp32 for tiny ones; else bf16")
    """dtype of the computation. fp8: products of the blocks' linear layers, forward and backward, in e4m3 with a scale
    per 128 elements, and all else in `fsdp.param_dtype`; for training tpshard's own dense families."""
    layers: Annotated[int, limits(least=1, most=10_000)] | None = None
    """Number of transformer blocks."""
    width: Annotated[int, limits(least=1, most=2**20)] | None = None
    """Width of the residual stream."""
    heads: Annotated[int, limits(least=1, most=2**16)] | None = None
    """Number of query heads."""
    kv_heads: Annotated[int, limits(least=1, most=2**16)] | None = None
    """Number of key and value heads; fewer than `heads` is grouped-query attention, 1 is multi-query."""
    head_dim: Annotated[int, limits(least=2, most=2**14)] | None = None
    """Size of a head; need not be width / heads."""
    mlp: Annotated[int, limits(least=1, most=2**24)] | None = None
    """Hidden size of the MLP."""
    vocab: Annotated[int, limits(least=1, most=2**26)] | None = None
    """Size of the vocabulary; at least as many as the tokenizer has tokens. More than a folder has are new tokens,
    whose rows begin as the mean of all."""
    pad_token: Annotated[int, limits(least=0, most=2**26)] | None = None
    """The token whose row of the embedding table gets no gradient from lookups; a folder's is the `pad_token_id` of its
    config.json."""
    experts: Annotated[int, limits(least=1, most=2**16)] | None = None
    """Routed experts per layer; for mixture presets."""
    top_k: Annotated[int, limits(least=1, most=2**16)] | None = None
    """Routed experts that compute each token."""
    shared_experts: Annotated[int, limits(least=0, most=2**10)] | None = None
    """Experts that compute every token."""
    capacity: Annotated[float, limits(above=0, most=2**16)] | None = None
    """Tokens that an expert accepts of a sequence, as a multiple of the mean; the rest are dropped. null: none are
    dropped."""
    routing: Literal["softmax", "sigmoid"] | None = None
    """How the router's logits become scores."""
    norm_top_k: bool | None = None
    """Whether the scores of a token's experts are normalized to sum to 1."""
    route_scale: Positive | None = None
    """Factor of these scores."""
    balance: Literal["bias", "loss", "none"] | None = None
    """How the experts' load is balanced: by a bias used only to choose, by an auxiliary loss, or not at all."""
    balance_rate: Positive | None = None
    """Step of the bias, or weight of each layer's loss."""
    tie_embeddings: bool | None = None
    """Whether the output projection shares the embedding's matrix."""
    rope_theta: Annotated[float, limits(above=0, most=1e15)] | None = None
    """Base of the rotary frequencies."""
    rope_scaling: RopeScalingSection | None = None
    """Llama 3's scaling of long rotary wavelengths."""
    max_seq: Annotated[int, limits(least=1, most=2**30)] | None = None
    """Longest sequence that the positions support."""
    attention_bias: bool | None = None
    """Whether attention's projections have a bias."""
    mlp_bias: bool | None = None
    """Whether the MLP's projections have a bias."""
    window: Annotated[int, limits(least=1, most=2**30)] | None = None
    """Positions, its own included, that a token attends to (sliding-window attention)."""
    full_layers: tuple[CountOrZero, ...] | None = None
    """Layers, counted from 0, that ignore `window` and attend to all positions."""
    norm_eps: Annotated[float, limits(above=0, most=1)] | None = None
    """Added under the root of the normalization."""

    @property
    def named_by(self) -> str | None:
        """The key that names the model, the first of `exclusive` that is set; None where none is."""
        stored = self.stored()
        return next((key for key in self.exclusive if stored[key] is not None), None)

    def overrides(self) -> dict[str, Any]:
        """The dimensions that the recipe changes, by the names in `ModelConfig`."""
        others = (*self.exclusive, "dims", "args", "seq_len", "dtype")
        values = {name: getattr(self, name) for name in self.stored() if name not in others}
        if self.rope_scaling is not None:
            values["rope_scaling"] = {name: getattr(self.rope_scaling, name) for name in self.rope_scaling.stored()}
        return {name: value for name, value in values.items() if value is not None}
