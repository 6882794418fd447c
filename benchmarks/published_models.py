"""The models of published runs: the keys of `model` that say the same, from presets or from a config.json.

Models that no preset has are computed by transformers' classes, from the sizes that their folders publish.
"""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tpshard.models.families.presets import PRESETS

MPT_SIZES = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20),
    "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip
"""Layers, width and heads of llm-foundry's configurations (scripts/train/yamls/pretrain)."""
_MPT = "preset: granite-20b, layers: {}, width: {}, heads: {}, kv_heads: {}, head_dim: {}, mlp: {}, vocab: 50368"
_LATENT = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
_DEEPSEEK_3 = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **_LATENT, "n_group": 1,
               "topk_group": 1, "norm_topk_prob": True}  # fmt: skip
_QWEN_2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064, "rms_norm_eps": 1e-6,
           "rope_theta": 1e6, "tie_word_embeddings": False, "max_position_embeddings": 32768,
           "torch_dtype": "bfloat16"}  # fmt: skip
_GPT_OSS = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "hidden_size": 2880,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
            "num_experts_per_tok": 4, "sliding_window": 128, "rope_theta": 150000, "max_position_embeddings": 131072,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16"}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "DeepSeek-V2": {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], **_LATENT, "vocab_size": 102400,
        "hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128, "num_key_value_heads": 128,
        "q_lora_rank": 1536, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "topk_method": "group_limited_greedy", "n_group": 8,
        "topk_group": 3, "routed_scaling_factor": 16.0,
    },
    "DeepSeek-V3": {
        **_DEEPSEEK_3, "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "q_lora_rank": 1536, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5,
        "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
    },
    "Moonlight-16B-A3B": {
        **_DEEPSEEK_3, "vocab_size": 163840, "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": None, "intermediate_size": 11264, "moe_intermediate_size": 1408,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "routed_scaling_factor": 2.446,
    },
    "Kimi K2": {
        **_DEEPSEEK_3, "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
        "num_key_value_heads": 64, "q_lora_rank": 1536, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "routed_scaling_factor": 2.827,
    },
    "Qwen2.5 7B": {
        **_QWEN_2, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944,
    },
    "Qwen2.5 32B": {
        **_QWEN_2, "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
        "intermediate_size": 27648,
    },
    "Qwen2.5 0.5B": {
        **_QWEN_2, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "Qwen2.5 1.5B": {
        **_QWEN_2, "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "Qwen2.5 3B": {
        **_QWEN_2, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
        "intermediate_size": 11008, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "Qwen2.5 14B": {
        **_QWEN_2, "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
        "intermediate_size": 13824,
    },
    "Qwen2.5 72B": {
        **_QWEN_2, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 29568,
    },
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
}  # fmt: skip
"""What matters to a plan of the config.json of published folders."""
MODELS: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"llama3_(70|405)b": r"preset: llama3-\1b",
    r"Qwen3-(0\.6B|4B).*": lambda name: f"preset: qwen3-{name[1].lower()}",
    r"Llama3 (8|70)B.*": r"preset: llama3-\1b",
    r"Llama-3 MoE dim2048 L24 (\d+)e top2.*": (
        r"preset: mixtral-8x7b, layers: 24, width: 2048, heads: 16, kv_heads: 4, mlp: 7168, vocab: 128256, experts: \1"
    ),
    r"Llama-3\.2-1B": "preset: llama3-1b",
    r"Llama-3(?:\.[13])?-(8|70|405)B": r"preset: llama3-\1b",
    r"Llama-2-7B": "preset: llama3-8b, kv_heads: 32, mlp: 11008, vocab: 32000",
    r"Llama-2-13B": "preset: llama3-8b, layers: 40, width: 5120, heads: 40, kv_heads: 40, mlp: 13824, vocab: 32000",
    r"Llama-3\.2-3B": "preset: llama3-8b, layers: 28, width: 3072, heads: 24, mlp: 8192, tie_embeddings: true",
    r"Mistral-7B.*": "preset: llama3-8b, vocab: 32768",
    r"Mixtral-8x22B": (
        "preset: mixtral-8x7b, layers: 56, width: 6144, heads: 48, kv_heads: 8, mlp: 16384, vocab: 32768"
    ),
    r"Llama-2-70B": "preset: llama3-70b, vocab: 32000",
    r"Mixtral-8x7B": "preset: mixtral-8x7b",
    r"Qwen3-8B": "preset: qwen3-4b, width: 4096, mlp: 12288, tie_embeddings: false",
    r"Qwen3-1\.7B": "preset: qwen3-4b, layers: 28, width: 2048, heads: 16, mlp: 6144",
    r"Qwen3-14B": "preset: qwen3-4b, layers: 40, width: 5120, heads: 40, mlp: 17408, tie_embeddings: false",
    r"Qwen3-32B": "preset: qwen3-4b, layers: 64, width: 5120, heads: 64, mlp: 25600, tie_embeddings: false",
    r"Qwen3(?: MoE|-)[ ]?30B.*": "preset: qwen3-30b-a3b",
    r"Qwen3-235B.*": "preset: qwen3-30b-a3b, layers: 94, width: 4096, heads: 64, mlp: 1536",
    r"MPT-(\w+) .*": lambda name: _mpt(name[1]),
}
"""Patterns of published model names with the keys of `model` that say the same."""
CLASSES = {
    r"deepseekv2": "DeepSeek-V2", r"DeepSeek V3 671B": "DeepSeek-V3",
    r"Moonlight-16B-A3B.*": "Moonlight-16B-A3B", r"Kimi K2": "Kimi K2",
    r"Qwen2\.5.(0\.5|1\.5|3|7|14|32|72)B": r"Qwen2.5 \1B", r"gpt-oss-(20|120)b": r"gpt-oss-\1b",
}  # fmt: skip
"""Patterns of the names of those that transformers' classes compute, with their config.json."""


def keys_of(published: str) -> str | None:
    """The keys of `model` of a published model, such as "deepseekv2 cut to 4 layers"; None if it is not known."""
    name, _, layers = published.removesuffix(" layers").partition(" cut to ")
    for pattern, said in CLASSES.items():
        if match := re.fullmatch(pattern, name):
            model = match.expand(said)
            return f"transformers: {folder_of(model, int(layers or CONFIGS[model]['num_hidden_layers']))}"
    for pattern, keys in MODELS.items():
        if match := re.fullmatch(pattern, name):
            written = match.expand(keys) if isinstance(keys, str) else keys(match)
            if layers:
                written = re.sub(r", layers: \d+", "", written) + f", layers: {layers}"
            return written
    return None


def layers_of(published: str) -> int:
    """The layers of a published model whose keys are known."""
    name = published.partition(" cut to ")[0]
    for pattern, said in CLASSES.items():
        if match := re.fullmatch(pattern, name):
            return int(CONFIGS[match.expand(said)]["num_hidden_layers"])
    keys = keys_of(name) or ""
    written = re.search(r"layers: (\d+)", keys)
    return int(written[1]) if written else PRESETS[re.sub(r"preset: ([^,]+).*", r"\1", keys)].layers


@cache
def folder_of(model: str, layers: int) -> Path:
    """A folder with the config.json of one of `CONFIGS`, cut to so many layers, which this process removes."""
    config: Mapping[str, Any] = CONFIGS[model]
    folder = Path(tempfile.mkdtemp(prefix="published-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    return folder


def _mpt(size: str) -> str:
    layers, width, heads = MPT_SIZES[size]
    return _MPT.format(layers, width, heads, heads, width // heads, 4 * width)
