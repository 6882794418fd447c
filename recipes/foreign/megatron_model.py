"""Megatron-LM's flags of a model's sizes, as the keys of a recipe's `model`."""

from __future__ import annotations

import re
from typing import Any

from tpshard.models.families.presets import PRESETS
from tpshard.recipes.foreign.translation import Conflict, KeyRow, Maybe, Omit, Unsaid, stated

VOCABULARIES = (
    (r"GPT2BPE|gpt2-vocab", 50257), (r"Llama-?3|meta-llama/.*3\.|llama3", 128256),
    (r"Llama2Tokenizer|Llama-2|mixtral|mistral", 32000), (r"Qwen2\.5-(7|14|32|72)B", 152064),
    (r"Qwen", 151936), (r"deepseek", 129280),
)  # fmt: skip
"""Tokens of tokenizers by a part of their type or name."""
KIND: dict[str, Any] = {
    "--num-layers": Maybe(int), "--hidden-size": Maybe(int), "--num-attention-heads": Maybe(int),
    "--position-embedding-type": "learned_absolute", "--use-rotary-position-embeddings": False,
    "--rotary-base": 10000, "--use-rope-scaling": False,
    "--normalization": "LayerNorm", "--swiglu": False, "--squared-relu": False, "--qk-layernorm": False,
    "--disable-bias-linear": False, "--add-qkv-bias": False, "--multi-latent-attention": False,
    "--num-experts": Maybe(int), "--moe-router-topk": 2, "--moe-router-score-function": "softmax",
    "--moe-router-pre-softmax": False, "--moe-router-load-balancing-type": "aux_loss", "--moe-aux-loss-coeff": 0.0,
    "--moe-router-enable-expert-bias": False, "--moe-router-bias-update-rate": 1e-3,
    "--moe-shared-expert-intermediate-size": Maybe(int), "--moe-ffn-hidden-size": Maybe(int),
    "--ffn-hidden-size": Maybe(int), "--moe-layer-freq": Maybe(object), "--moe-expert-capacity-factor": Maybe(float),
    "--moe-router-topk-scaling-factor": Maybe(float), "--window-size": Maybe(object),
    "--hybrid-override-pattern": Maybe(str), "--hybrid-layer-pattern": Maybe(str),
}  # fmt: skip
"""What decides on the kind of a model, with the defaults of Megatron-LM."""


def kind(*values: Any) -> Any:
    """The preset that is most alike, and the keys that make it the flags' model; what differs is not said."""
    flags = {key[2:].replace("-", "_"): value for key, value in zip(KIND, values)}
    needed = ("num_layers", "hidden_size", "num_attention_heads")
    if missing := [f"--{key.replace('_', '-')}" for key in needed if flags[key] is None]:
        return Unsaid("without it the model is not known; give model.preset=...", {"hf": "MODEL"}, tuple(missing))
    if flags["use_rotary_position_embeddings"]:  # the name of older versions
        flags["position_embedding_type"] = "rope"
    mixture, differs = _mixture(flags) if flags["num_experts"] else ({}, {})
    preset = mixture.get("preset") or ("qwen3-4b" if flags["qk_layernorm"] else "llama3-8b")
    if not flags["swiglu"] and not mixture:
        preset = "granite-20b"
    keys = {"preset": preset, **mixture}
    biased = not flags["disable_bias_linear"]
    if preset in ("llama3-8b", "granite-20b"):
        keys |= {"attention_bias": biased, "mlp_bias": biased}
    elif biased:
        differs["--disable-bias-linear"] = f"{preset} has no biases"
    if preset != "granite-20b":
        keys |= {"rope_theta": float(flags["rotary_base"])}
    if PRESETS[preset].rope_scaling is not None and not flags["use_rope_scaling"]:
        keys |= {"rope_scaling": {"factor": 1}}
    differs |= _differences(flags, preset)
    return Unsaid("; ".join(dict.fromkeys(differs.values())), keys, of_each=differs) if differs else keys


def mlp(size: int | None, width: int | None, gated: bool, of_experts: int | None) -> Any:
    """The hidden size of an MLP: four times the width, and two thirds of that where it is gated."""
    if of_experts or size:
        return of_experts or size
    return Omit if width is None else int(4 * width * 2 / 3 / 64) * 64 if gated else 4 * width


def _groups(grouped: bool, groups: int, heads: int | None) -> Any:
    if heads is None or grouped or groups == 1:
        return Omit if heads is None else groups if grouped else heads
    keys = ("--num-query-groups",)
    return Conflict(f"{keys[0]} has no effect without --group-query-attention", heads, "add it", keys)


SIZES = (
    KeyRow("model", KIND, kind),
    KeyRow("model.layers", {"--num-layers": Maybe(int)}, stated),
    KeyRow("model.width", {"--hidden-size": Maybe(int)}, stated),
    KeyRow("model.heads", {"--num-attention-heads": Maybe(int)}, stated),
    KeyRow(
        "model.kv_heads",
        {"--group-query-attention": False, "--num-query-groups": 1, "--num-attention-heads": Maybe(int)},
        _groups,
    ),
    KeyRow(
        "model.head_dim",
        {"--kv-channels": Maybe(int), "--hidden-size": Maybe(int), "--num-attention-heads": Maybe(int)},
        lambda size, width, heads: size or (width // heads if width and heads else Omit),
    ),
    KeyRow(
        "model.mlp",
        {"--ffn-hidden-size": Maybe(int), "--hidden-size": Maybe(int), "--swiglu": False,
         "--moe-ffn-hidden-size": Maybe(int)},
        mlp,
    ),
    KeyRow("model.max_seq", {"--max-position-embeddings": Maybe(int)}, stated),
    KeyRow("model.norm_eps", {"--norm-epsilon": 1e-5}),
    KeyRow("model.tie_embeddings", {"--untie-embeddings-and-output-weights": False}, lambda untied: not untied),
    KeyRow(
        "model.vocab",
        {"--vocab-size": Maybe(int), "--padded-vocab-size": Maybe(int), "--tokenizer-type": Maybe(str),
         "--tokenizer-model": Maybe(object), "--vocab-file": Maybe(object),
         "--make-vocab-size-divisible-by": 128, "--tensor-model-parallel-size": 1},
        lambda *values: vocabulary(*values),
    ),
)  # fmt: skip
"""The rows of `model`."""


def _mixture(flags: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The keys of a mixture of experts, and what differs of it by flag."""
    differs: dict[str, str] = {}
    shared, bias = flags["moe_shared_expert_intermediate_size"], flags["moe_router_enable_expert_bias"]
    sigmoid = flags["moe_router_score_function"] == "sigmoid"
    special = bool(shared or sigmoid or bias)
    preset = "tiny-moe" if special else "qwen3-30b-a3b" if flags["qk_layernorm"] else "mixtral-8x7b"
    keys: dict[str, Any] = {"preset": preset, "experts": flags["num_experts"], "top_k": flags["moe_router_topk"]}
    if special:
        each = flags["moe_ffn_hidden_size"] or flags["ffn_hidden_size"] or 4 * flags["hidden_size"]
        keys |= {"shared_experts": (shared or 0) // each, "routing": flags["moe_router_score_function"]}
        if (shared or 0) % each:
            differs["--moe-shared-expert-intermediate-size"] = "shared experts are as large as the others here"
        if not flags["qk_layernorm"]:
            differs["--qk-layernorm"] = "a mixture with shared experts has normed queries and keys here"
        if scale := flags["moe_router_topk_scaling_factor"]:
            keys["route_scale"] = scale
    elif flags["moe_router_pre_softmax"] and not flags["qk_layernorm"]:
        differs["--moe-router-pre-softmax"] = "the chosen scores are normalized to sum to 1"
    if not special and flags["moe_router_topk_scaling_factor"] not in (None, 1):
        differs["--moe-router-topk-scaling-factor"] = (
            "only a mixture with shared experts or sigmoids scales scores here"
        )
    coefficient, way = flags["moe_aux_loss_coeff"], str(flags["moe_router_load_balancing_type"])
    aux = "aux_loss" in way and isinstance(coefficient, int | float) and coefficient > 0
    if way not in ("aux_loss", "none") and (aux or "aux_loss" not in way):
        differs["--moe-router-load-balancing-type"] = "the experts' load is balanced over a micro-batch, by a loss"
    if bias and flags["moe_router_bias_update_rate"]:
        keys |= {"balance": "bias", "balance_rate": flags["moe_router_bias_update_rate"]}
        if aux:
            differs["--moe-aux-loss-coeff"] = "the experts' load is balanced by the bias alone"
    elif aux:
        keys |= {"balance": "loss", "balance_rate": coefficient}
    else:
        keys |= {"balance": "none"}
    if flags["moe_expert_capacity_factor"]:
        keys["capacity"] = flags["moe_expert_capacity_factor"] * flags["moe_router_topk"]
    if not re.fullmatch(r"None|1|\(?\[1\]\*\d+\)?", str(flags["moe_layer_freq"])):
        differs["--moe-layer-freq"] = "every layer has experts here"
    return keys, differs


def _differences(flags: dict[str, Any], preset: str) -> dict[str, str]:
    """What of the flags the preset's family is not, by flag."""
    differs: dict[str, str] = {}
    if preset == "granite-20b":
        if flags["position_embedding_type"] != "learned_absolute":
            differs["--position-embedding-type"] = "a model without --swiglu has learned positions here"
        if flags["normalization"] != "LayerNorm":
            differs["--normalization"] = "a model without --swiglu has LayerNorm here"
        if flags["squared_relu"]:
            differs["--squared-relu"] = "a model without --swiglu has GELU here"
    else:
        if flags["normalization"] != "RMSNorm":
            differs["--normalization"] = "a gated model has RMSNorm here"
        if flags["position_embedding_type"] not in ("rope", "mrope"):
            differs["--position-embedding-type"] = "a gated model has rotary positions here"
        if not flags["swiglu"]:
            differs["--swiglu"] = "experts are gated here"
    if flags["add_qkv_bias"] and preset != "granite-20b":
        differs["--add-qkv-bias"] = "no preset has biases for queries, keys and values alone"
    if flags["multi_latent_attention"]:
        differs["--multi-latent-attention"] = (
            "no family here has latent attention: its sizes are those of grouped queries"
        )
    if flags["window_size"] is not None:
        differs["--window-size"] = "give model.window=..."
    for name in ("hybrid_override_pattern", "hybrid_layer_pattern"):
        if flags[name] is not None:
            differs[f"--{name.replace('_', '-')}"] = "no family here has layers of several kinds"
    return differs


def vocabulary(
    size: int | None, padded: int | None, tokenizer: str | None, name: Any, file: Any, divisor: int, tp: int
) -> Any:
    """The tokens of the embedding table, which are padded so that tensor parallelism divides them."""
    if padded is not None:
        return padded
    names = f"{tokenizer} {name} {file}"
    found = size or next((n for pattern, n in VOCABULARIES if re.search(pattern, names, re.I)), None)
    if found is None:
        return Unsaid("the tokenizer's size is not in the file; give model.vocab=...", 128256, ("--vocab-size",))
    return -(-found // (divisor * tp)) * divisor * tp
