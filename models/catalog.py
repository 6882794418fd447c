"""The families that tpshard computes itself. A new one is an entry here, and what it computes anew in `models.mlp` or
`models.decoder`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from tpshard.models.family import Dims, Family, HuggingFace, Key, Leaf, Part

_Value = TypeVar("_Value")

RMS_NORM = Leaf("rms_norm", ("embed",))
LAYER_NORM = Leaf("layer_norm", ("embed",), bias=True)

ATTENTION = Part(
    "attention",
    {
        "wq": Leaf("linear", ("heads", "embed"), bias="attention_bias"),
        "wk": Leaf("linear", ("kv_heads", "embed"), bias="attention_bias"),
        "wv": Leaf("linear", ("kv_heads", "embed"), bias="attention_bias"),
        "wo": Leaf("linear", ("embed", "heads"), bias="attention_bias"),
    },
    {
        "q": ("batch", "seq", "heads", "head_dim"),
        "k": ("batch", "seq", "kv_heads", "head_dim"),
        "v": ("batch", "seq", "kv_heads", "head_dim"),
        "attended": ("batch", "seq", "heads", "head_dim"),
    },
)
SWIGLU = Part(
    "swiglu",
    {
        "gate": Leaf("linear", ("mlp", "embed"), bias="mlp_bias"),
        "up": Leaf("linear", ("mlp", "embed"), bias="mlp_bias"),
        "down": Leaf("linear", ("embed", "mlp"), bias="mlp_bias"),
    },
    {"hidden": ("batch", "seq", "mlp")},
)
GELU = Part("gelu", {name: SWIGLU.leaves[name] for name in ("up", "down")}, SWIGLU.activations)


def decoder(
    name: str, hf: HuggingFace, *, numbers: tuple[str, ...], mlp: Part, norm: Leaf = RMS_NORM, learned: bool = False
) -> Family:
    """A family of `models.decoder`: tables (of positions too where those are `learned`), layers of attention and MLP,
    each behind a norm, a last norm and a head."""
    layer = {"attention_norm": norm, **_inside("attention", ATTENTION.leaves)}
    layer |= {"mlp_norm": norm, **_inside("mlp", mlp.leaves)}
    leaves = {"tok_embed": Leaf("table", ("vocab", "embed"))}
    if learned:
        leaves["pos_embed"] = Leaf("table", ("positions", "embed"))
    leaves |= {**_inside("layers.*", layer), "norm": norm, "output": Leaf("linear", ("vocab", "embed"))}
    stream: Dims = ("batch", "seq", "embed")
    named = _inside("layers.*.attention", ATTENTION.activations) | _inside("layers.*.mlp", mlp.activations)
    activations = {"embedded": stream, **named, "layers.*.residual": stream, "logits": ("batch", "seq", "vocab")}
    return Family(name, "learned" if learned else "rotary", mlp.name, leaves, activations, frozenset(numbers), hf)


def _inside(place: str, these: Mapping[str, _Value]) -> dict[str, _Value]:
    return {f"{place}.{name}": value for name, value in these.items()}


# ---- Llama (Touvron et al. 2023; the Llama 3 report, 2024) -------------------------------------------------------
LLAMA_NAMES = {
    "tok_embed": "model.embed_tokens",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.attention.wq": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.wk": "model.layers.*.self_attn.k_proj",
    "layers.*.attention.wv": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.wo": "model.layers.*.self_attn.o_proj",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp.gate": "model.layers.*.mlp.gate_proj",
    "layers.*.mlp.up": "model.layers.*.mlp.up_proj",
    "layers.*.mlp.down": "model.layers.*.mlp.down_proj",
    "norm": "model.norm",
    "output": "lm_head",
}


def width_per_head(read: Mapping[str, Any]) -> int:
    width, heads = read["width"], read["heads"]
    if width % heads:
        raise ValueError(f"`hidden_size: {width}` is not a multiple of {heads} heads and there is no `head_dim`")
    return int(width // heads)


LLAMA_KEYS = (
    Key("num_hidden_layers", "layers"),
    Key("hidden_size", "width"),
    Key("num_attention_heads", "heads"),
    Key("num_key_value_heads", "kv_heads", lambda read: read["heads"]),
    Key("head_dim", "head_dim", width_per_head),
    Key("intermediate_size", "mlp"),
    Key("max_position_embeddings", "max_seq", 2048),
    Key("tie_word_embeddings", "tie_embeddings", False, bool),
    Key("rms_norm_eps", "norm_eps", 1e-6, float),
    Key("attention_bias", "attention_bias", False, bool),
    Key("mlp_bias", "mlp_bias", False, bool),
)


def heads_divide_the_width(c: Any) -> None:
    if c.width % c.heads:
        raise ValueError(
            f"transformers wants a width that the heads divide, even beside `head_dim`: {c.width}, {c.heads}"
        )


LLAMA = decoder(
    "llama",
    HuggingFace(
        "llama",
        "LlamaForCausalLM",
        LLAMA_NAMES,
        LLAMA_KEYS,
        fixed={"hidden_act": ("silu", "swish")},
        written={"attention_dropout": 0.0},
        check=heads_divide_the_width,
    ),
    numbers=("rope_theta", "rope_scaling", "attention_bias", "mlp_bias"),
    mlp=SWIGLU,
)


# ---- Granite's code models of 20B and 34B, GPTBigCode by architecture (Mishra et al. 2024; Li et al. 2023) -----------
def _check_bigcode(c: Any) -> None:
    if c.heads * c.head_dim != c.width:
        raise ValueError(f"gpt_bigcode needs heads * head_dim equal to the width: {c.heads} * {c.head_dim}, {c.width}")
    if c.kv_heads not in (1, c.heads):
        raise ValueError(f"gpt_bigcode has one KV head or one a head, not {c.kv_heads} of {c.heads}")
    if not (c.attention_bias and c.mlp_bias):
        raise ValueError("gpt_bigcode has biases; a granite without them cannot be written")


def _bigcode_head_dim(read: Mapping[str, Any]) -> int:
    if read["width"] % read["heads"]:
        raise ValueError(f"`n_embd: {read['width']}` is not a multiple of {read['heads']} heads")
    return int(read["width"] // read["heads"])


GRANITE = decoder(
    "granite",
    HuggingFace(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        {
            "tok_embed": "transformer.wte",
            "pos_embed": "transformer.wpe",
            "layers.*.attention_norm": "transformer.h.*.ln_1",
            "layers.*.attention.wq": "transformer.h.*.attn.c_attn",
            "layers.*.attention.wk": "transformer.h.*.attn.c_attn",
            "layers.*.attention.wv": "transformer.h.*.attn.c_attn",
            "layers.*.attention.wo": "transformer.h.*.attn.c_proj",
            "layers.*.mlp_norm": "transformer.h.*.ln_2",
            "layers.*.mlp.up": "transformer.h.*.mlp.c_fc",
            "layers.*.mlp.down": "transformer.h.*.mlp.c_proj",
            "norm": "transformer.ln_f",
            "output": "lm_head",
        },
        (
            Key("n_layer", "layers"),
            Key("n_embd", "width"),
            Key("n_head", "heads"),
            Key(
                "multi_query", "kv_heads", True, bool,
                read=lambda said, read: 1 if said else read["heads"], write=lambda c: c.kv_heads == 1,
            ),
            Key("n_inner", "mlp", lambda read: 4 * read["width"]),
            Key("n_positions", "max_seq", 1024),
            Key("tie_word_embeddings", "tie_embeddings", True, bool),
            Key("layer_norm_epsilon", "norm_eps", 1e-5, float),
        ),
        derived={"head_dim": _bigcode_head_dim, "attention_bias": lambda _: True, "mlp_bias": lambda _: True},
        fixed={"activation_function": ("gelu_pytorch_tanh", "gelu_new"), "scale_attn_weights": (True,)},
        written={
            "add_cross_attention": False, "attention_softmax_in_fp32": True, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
            "resid_pdrop": 0.0, "scale_attention_softmax_in_fp32": True,
        },
        check=_check_bigcode,
    ),
    numbers=("attention_bias", "mlp_bias"),
    mlp=GELU,
    norm=LAYER_NORM,
    learned=True,
)  # fmt: skip

FAMILIES = {family.name: family for family in (LLAMA, GRANITE)}
