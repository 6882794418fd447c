"""The model families that tpshard computes itself, as data.

A new family is an entry here, plus the parts of its layers that `models.mlp` and `models.decoder` lack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from tpshard.models.families.family import Family, HuggingFace, Key, Leaf, Named, Part, Weight, Windows

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
        "q": Named(("batch", "seq", "heads", "head_dim")),
        "k": Named(("batch", "seq", "kv_heads", "head_dim")),
        "v": Named(("batch", "seq", "kv_heads", "head_dim")),
        "attended": Named(("batch", "seq", "heads", "head_dim")),
    },
)
SWIGLU = Part(
    "swiglu",
    {
        "gate": Leaf("linear", ("mlp", "embed"), bias="mlp_bias"),
        "up": Leaf("linear", ("mlp", "embed"), bias="mlp_bias"),
        "down": Leaf("linear", ("embed", "mlp"), bias="mlp_bias"),
    },
    {"hidden": Named(("batch", "seq", "mlp"))},
)
MOE = Part(
    "moe",
    {
        "router": Leaf("linear", ("choice", "embed"), bias="balanced_by_bias"),
        "experts.gate": Leaf("experts", ("expert", "mlp", "embed")),
        "experts.up": Leaf("experts", ("expert", "mlp", "embed")),
        "experts.down": Leaf("experts", ("expert", "embed", "mlp")),
        **{
            f"shared.{name}": replace(leaf, bias=False, when="shared_experts", times="shared_experts")
            for name, leaf in SWIGLU.leaves.items()
        },
    },
    {
        "scores": Named(("batch", "seq", "choice")),
        "dispatched": Named(("expert", "group", "slot", "embed"), when="capacity"),
        "hidden": Named(("expert", "group", "slot", "mlp"), when="capacity"),
        "computed": Named(("expert", "group", "slot", "embed"), when="capacity"),
        "shared.hidden": Named(("batch", "seq", "mlp"), when="shared_experts"),
    },
)
GELU = Part("gelu", {name: SWIGLU.leaves[name] for name in ("up", "down")}, SWIGLU.activations)


def decoder(
    name: str, hf: HuggingFace, *, numbers: tuple[str, ...], mlp: Part = SWIGLU, attention: Part = ATTENTION,
    norm: Leaf = RMS_NORM, learned: bool = False,
) -> Family:  # fmt: skip
    """A family computed by `models.decoder`: an embedding table, layers of attention and MLP, each after a norm, a
    final norm and a head. `learned`: with a table of position embeddings."""
    layer = {"attention_norm": norm, **_prefix("attention", attention.leaves)}
    layer |= {"mlp_norm": norm, **_prefix("mlp", mlp.leaves)}
    leaves = {"tok_embed": Leaf("table", ("vocab", "embed"))}
    if learned:
        leaves["pos_embed"] = Leaf("table", ("positions", "embed"))
    leaves |= {**_prefix("layers.*", layer), "norm": norm, "output": Leaf("linear", ("vocab", "embed"))}
    stream = Named(("batch", "seq", "embed"))
    named = _prefix("layers.*.attention", attention.activations) | _prefix("layers.*.mlp", mlp.activations)
    activations = {"embedded": stream, **named, "layers.*.residual": stream, "logits": Named(("batch", "seq", "vocab"))}
    return Family(name, "learned" if learned else "rotary", mlp.name, leaves, activations, frozenset(numbers), hf)


def _prefix(place: str, these: Mapping[str, _Value]) -> dict[str, _Value]:
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


def keys(mlp: str = "intermediate_size", **defaults: Any) -> tuple[Key, ...]:
    """Llama's config.json keys, shared by other families that differ only in the defaults of missing keys."""
    null = {"kv_heads": lambda read: read["heads"], "head_dim": width_per_head}
    missing = {**null, "norm_eps": 1e-6, "tie_embeddings": False, **defaults}
    theirs = {
        "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "mlp": mlp,
        "max_seq": "max_position_embeddings", "norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings",
    }  # fmt: skip
    kinds = {"norm_eps": float, "tie_embeddings": bool}
    return tuple(
        Key(name, ours, missing.get(ours), kinds.get(ours, int), null.get(ours)) for ours, name in theirs.items()
    )


ROPE = ("rope_theta", "rope_scaling")
SILU = {"hidden_act": ("silu", "swish")}
NO_DROPOUT = {"attention_dropout": 0.0}


def heads_divide_the_width(c: Any) -> None:
    if c.width % c.heads:
        raise ValueError(
            f"transformers requires heads to divide the width, even with `head_dim`: width {c.width}, heads {c.heads}"
        )


LLAMA = decoder(
    "llama",
    HuggingFace(
        "llama",
        "LlamaForCausalLM",
        LLAMA_NAMES,
        (
            *keys(max_seq=2048),
            Key("attention_bias", "attention_bias", False, bool),
            Key("mlp_bias", "mlp_bias", False, bool),
        ),
        fixed=SILU,
        written=NO_DROPOUT,
        check=heads_divide_the_width,
    ),
    numbers=(*ROPE, "attention_bias", "mlp_bias"),
)


# ---- Mistral (Jiang et al. 2023): Llama without biases, with a sliding attention window ----------------------------
MISTRAL = decoder(
    "mistral",
    HuggingFace(
        "mistral", "MistralForCausalLM", LLAMA_NAMES, keys(max_seq=131072, kv_heads=8), windows=Windows(4096),
        fixed=SILU, written=NO_DROPOUT,
    ),
    numbers=(*ROPE, "window"),
)  # fmt: skip


# ---- Qwen2 and Qwen3 (Yang et al. 2024, 2025): biases on queries, keys and values; then normed queries and keys -----
QWEN2_ATTENTION = replace(
    ATTENTION, leaves={name: replace(leaf, bias=name != "wo") for name, leaf in ATTENTION.leaves.items()}
)
QWEN3_ATTENTION = replace(
    ATTENTION, leaves={**ATTENTION.leaves, **dict.fromkeys(("q_norm", "k_norm"), Leaf("rms_norm", ("head_dim",)))}
)
QWEN3_NAMES = LLAMA_NAMES | {
    "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
}
QWEN2 = decoder(
    "qwen2",
    HuggingFace(
        "qwen2", "Qwen2ForCausalLM", LLAMA_NAMES, keys(max_seq=32768, kv_heads=32),
        windows=Windows(4096, True, first=28), fixed=SILU, written=NO_DROPOUT,
    ),
    numbers=(*ROPE, "window", "full_layers"),
    attention=QWEN2_ATTENTION,
)  # fmt: skip
QWEN3 = decoder(
    "qwen3",
    HuggingFace(
        "qwen3", "Qwen3ForCausalLM", QWEN3_NAMES,
        (*keys(max_seq=32768, kv_heads=32, head_dim=128), Key("attention_bias", "attention_bias", False, bool)),
        windows=Windows(4096, True, first=28), fixed=SILU, written=NO_DROPOUT,
    ),
    numbers=(*ROPE, "window", "full_layers", "attention_bias"),
    attention=QWEN3_ATTENTION,
)  # fmt: skip


# ---- mixtures of experts: Mixtral (Jiang et al. 2024), Qwen3's, and one with shared experts and balancing biases
def expert_names(router: str, experts: str, gate: str, up: str, down: str) -> dict[str, str]:
    """The folder's names of a mixture's modules, from those of one layer."""
    mixture = {"layers.*.mlp.router": f"model.layers.*.{router}"}
    mixture |= {
        f"layers.*.mlp.experts.{ours}": f"model.layers.*.{experts}.{{}}.{theirs}"
        for ours, theirs in (("gate", gate), ("up", up), ("down", down))
    }
    return {ours: theirs for ours, theirs in QWEN3_NAMES.items() if ".mlp." not in ours} | mixture


def no_router_bias(c: Any) -> None:
    if c.balance == "bias":
        raise ValueError(
            f"{c.family_entry.hf.model_type} has no router bias; a model with `balance: bias` cannot be written as one"
        )


# transformers' loss is the mean over layers, and top_k where the load is even; ours is the sum over layers, each then 1
AUXILIARY_LOSS = (
    Key("output_router_logits", "balance", False, bool,
        read=lambda stored, read: "loss" if stored else "none", write=lambda c: c.balance == "loss"),
    Key("router_aux_loss_coef", "balance_rate", 0.001, Weight,
        read=lambda stored, read: stored * read["top_k"] / read["layers"],
        write=lambda c: float(f"{c.balance_rate * c.layers / c.top_k:.12g}")),
)  # fmt: skip
ROUTED = ("experts", "top_k", "capacity", "balance", "balance_rate")
MIXTRAL = decoder(
    "mixtral",
    HuggingFace(
        "mixtral", "MixtralForCausalLM",
        expert_names("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
        (
            *keys(max_seq=131072, kv_heads=8, norm_eps=1e-5),
            Key("num_local_experts", "experts", 8), Key("num_experts_per_tok", "top_k", 2), *AUXILIARY_LOSS,
        ),
        theta=1e6, windows=Windows(None), fixed=SILU, written={**NO_DROPOUT, "router_jitter_noise": 0.0},
        check=no_router_bias,
    ),
    numbers=(*ROPE, *ROUTED, "window"),
    mlp=MOE,
)  # fmt: skip
QWEN_EXPERTS = expert_names("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
QWEN3_MOE = decoder(
    "qwen3_moe",
    HuggingFace(
        "qwen3_moe", "Qwen3MoeForCausalLM", QWEN_EXPERTS,
        (
            *keys(mlp="moe_intermediate_size", max_seq=32768, kv_heads=4),
            Key("attention_bias", "attention_bias", False, bool),
            Key("num_experts", "experts", 128, alias="num_local_experts"), Key("num_experts_per_tok", "top_k", 8),
            Key("norm_topk_prob", "norm_top_k", False, bool), *AUXILIARY_LOSS,
        ),
        windows=Windows(4096, True), fixed={**SILU, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
        written=NO_DROPOUT, check=no_router_bias,
    ),
    numbers=(*ROPE, *ROUTED, "norm_top_k", "attention_bias", "window"),
    mlp=MOE, attention=QWEN3_ATTENTION,
)  # fmt: skip


def _check_dots(c: Any) -> None:
    if (c.routing, c.balance) != ("sigmoid", "bias") or not c.shared_experts or c.experts < 2:
        raise ValueError("dots1 requires `routing: sigmoid`, `balance: bias`, shared experts and at least 2 others")
    if c.heads * c.head_dim != c.width:
        raise ValueError(f"dots1 requires heads * head_dim equal to the width: {c.heads} * {c.head_dim}, {c.width}")


MIXTURE = decoder(
    "moe",
    HuggingFace(
        "dots1", "Dots1ForCausalLM",
        QWEN_EXPERTS | {
            f"layers.*.mlp.shared.{name}": f"model.layers.*.mlp.shared_experts.{name}_proj" for name in SWIGLU.leaves
        },
        (
            *keys(mlp="moe_intermediate_size", max_seq=2048, kv_heads=32),
            Key("attention_bias", "attention_bias", False, bool), Key("n_routed_experts", "experts"),
            Key("num_experts_per_tok", "top_k"), Key("n_shared_experts", "shared_experts"),
            Key("norm_topk_prob", "norm_top_k", False, bool), Key("routed_scaling_factor", "route_scale", 1.0, float),
        ),
        windows=Windows(4096, first=62),
        derived={"routing": lambda _: "sigmoid", "balance": lambda _: "bias"},
        biases={"layers.*.mlp.router": "e_score_correction_bias"},
        fixed={**SILU, "n_group": (1,), "topk_group": (1,), "first_k_dense_replace": (0,)},
        written=NO_DROPOUT, check=_check_dots,
    ),
    numbers=(
        *ROPE, *ROUTED, "shared_experts", "routing", "norm_top_k", "route_scale", "attention_bias", "window",
        "full_layers",
    ),
    mlp=MOE, attention=QWEN3_ATTENTION,
)  # fmt: skip


# ---- Granite's code models of 20B and 34B, of the GPTBigCode architecture (Mishra et al. 2024; Li et al. 2023) ------
def _check_bigcode(c: Any) -> None:
    if c.heads * c.head_dim != c.width:
        raise ValueError(f"gpt_bigcode requires heads * head_dim = width, not {c.heads} * {c.head_dim} and {c.width}")
    if c.kv_heads not in (1, c.heads):
        raise ValueError(f"gpt_bigcode supports one KV head, or one per head, not {c.kv_heads} of {c.heads}")
    if not (c.attention_bias and c.mlp_bias):
        raise ValueError("gpt_bigcode has biases; a granite model without them cannot be written as one")


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
                read=lambda stored, read: 1 if stored else read["heads"], write=lambda c: c.kv_heads == 1,
            ),
            Key("n_inner", "mlp", lambda read: 4 * read["width"]),
            Key("n_positions", "max_seq", 1024),
            Key("tie_word_embeddings", "tie_embeddings", True, bool),
            Key("layer_norm_epsilon", "norm_eps", 1e-5, float),
        ),
        derived={"head_dim": _bigcode_head_dim, "attention_bias": lambda _: True, "mlp_bias": lambda _: True},
        pads=False,
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

FAMILIES = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, MIXTURE, GRANITE)}
