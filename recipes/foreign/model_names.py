"""Published models as the keys of a recipe's `model`."""

from __future__ import annotations

import re
from typing import Any

LLAMA = {"preset": "llama3-8b"}
PLAIN_ROPE: dict[str, Any] = {"rope_scaling": {"factor": 1}}
"""Llama 3.0 and 2: rotary positions without the scaling that the presets, Llama 3.1, have."""
LLAMA_2 = {**LLAMA, **PLAIN_ROPE, "rope_theta": 10000.0, "max_seq": 4096, "vocab": 32000}
MISTRAL = {**LLAMA, **PLAIN_ROPE, "rope_theta": 10000.0, "vocab": 32000, "max_seq": 32768}
MISTRAL_24B = {**MISTRAL, "layers": 40, "width": 5120, "mlp": 32768, "vocab": 131072, "rope_theta": 1e9}
LLAMA_7B = {"kv_heads": 32, "mlp": 11008}
LLAMA_13B = {"layers": 40, "width": 5120, "heads": 40, "kv_heads": 40, "mlp": 13824}
CODE = {**LLAMA_2, "rope_theta": 1e6, "max_seq": 16384, "vocab": 32016}
YI = {**LLAMA_2, "vocab": 64000, "rope_theta": 5e6}
DEEPSEEK = {**LLAMA_2, "vocab": 102400, "norm_eps": 1e-6}
SMOLLM_2 = {**LLAMA, **PLAIN_ROPE, "vocab": 49152, "max_seq": 8192, "rope_theta": 100000.0, "tie_embeddings": True}
QWEN_3 = {"preset": "qwen3-4b"}
QWEN_235B = {"preset": "qwen3-30b-a3b", "layers": 94, "width": 4096, "heads": 64, "mlp": 1536}

NAMES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"llama-?3\.2-1b", {"preset": "llama3-1b"}),
    (r"llama-?3\.2-3b", {**LLAMA, "layers": 28, "width": 3072, "heads": 24, "mlp": 8192, "tie_embeddings": True,
                         "rope_scaling": {"factor": 32}}),
    (r"(llama-?3\.1|distill-llama)-8b", LLAMA),
    (r"(llama-?3\.[13]|llama-3\.1-nemotron|distill-llama)-70b", {"preset": "llama3-70b"}),
    (r"llama-?3\.1-405b", {"preset": "llama3-405b"}),
    (r"llama-?3-8b", {**LLAMA, **PLAIN_ROPE, "max_seq": 8192}),
    (r"llama-?3-70b", {"preset": "llama3-70b", **PLAIN_ROPE, "max_seq": 8192}),
    (r"codellama-7b", {**CODE, **LLAMA_7B}),
    (r"codellama-13b", {**CODE, **LLAMA_13B}),
    (r"codellama-34b", {**CODE, "layers": 48, "width": 8192, "heads": 64, "mlp": 22016, "vocab": 32000}),
    (r"llama-?2-7b", {**LLAMA_2, **LLAMA_7B}),
    (r"llama-?2-13b", {**LLAMA_2, **LLAMA_13B}),
    (r"(^|/)llama-7b", {**LLAMA_2, **LLAMA_7B, "max_seq": 2048, "norm_eps": 1e-6}),
    (r"(^|/)llama-13b", {**LLAMA_2, **LLAMA_13B, "max_seq": 2048, "norm_eps": 1e-6}),
    (r"yi-(1\.5-)?6b", {**YI, "kv_heads": 4, "mlp": 11008}),
    (r"yi-(1\.5-)?9b", {**YI, "layers": 48, "kv_heads": 4, "mlp": 11008}),
    (r"yi-(1\.5-)?34b", {**YI, "layers": 60, "width": 7168, "heads": 56, "mlp": 20480}),
    (r"deepseek-llm-7b", {**DEEPSEEK, "layers": 30, "kv_heads": 32, "mlp": 11008}),
    (r"deepseek-llm-67b", {**DEEPSEEK, "layers": 95, "width": 8192, "heads": 64, "mlp": 22016}),
    (r"phi-4($|-bnb|-abliterated)", {**LLAMA_2, "layers": 40, "width": 5120, "heads": 40, "kv_heads": 10, "mlp": 17920,
                                     "vocab": 100352, "rope_theta": 250000.0, "max_seq": 16384}),
    (r"phi-3-mini-4k", {**LLAMA_2, "width": 3072, "kv_heads": 32, "head_dim": 96, "mlp": 8192, "vocab": 32064,
                        "window": 2047}),
    (r"phi-3-medium-4k", {**LLAMA_2, "layers": 40, "width": 5120, "heads": 40, "kv_heads": 10, "mlp": 17920,
                          "vocab": 32064, "window": 2047}),
    (r"llama-?2-70b", {**LLAMA_2, "layers": 80, "width": 8192, "heads": 64, "mlp": 28672}),
    (r"tinyllama.*1\.1", {**LLAMA_2, "layers": 22, "width": 2048, "kv_heads": 4, "head_dim": 64, "mlp": 5632}),
    (r"smollm2-135m", {**SMOLLM_2, "layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "mlp": 1536}),
    (r"smollm2-360m", {**SMOLLM_2, "layers": 32, "width": 960, "heads": 15, "kv_heads": 5, "head_dim": 64,
                       "mlp": 2560}),
    (r"smollm2-1\.7b", {**SMOLLM_2, "layers": 24, "width": 2048, "kv_heads": 32, "head_dim": 64, "mlp": 8192,
                        "rope_theta": 130000.0}),
    (r"(mistral-7b.*v0\.1|zephyr-7b)", {**MISTRAL, "window": 4096}),
    (r"mistral-nemo", {**MISTRAL, "layers": 40, "width": 5120, "vocab": 131072, "rope_theta": 1e6, "max_seq": 131072}),
    (r"mistral-small-24b", {**MISTRAL_24B, "rope_theta": 1e8}),
    (r"(mistral|magistral|devstral)-small-(3\.[12]-24b|25(05|06|07|09))", {**MISTRAL_24B, "max_seq": 131072}),
    (r"mistral-large.*2407", {**MISTRAL, "layers": 88, "width": 12288, "heads": 96, "mlp": 28672, "vocab": 32768,
                              "rope_theta": 1e6, "max_seq": 131072}),
    (r"codestral-22b", {**MISTRAL, "layers": 56, "width": 6144, "heads": 48, "mlp": 16384, "vocab": 32768,
                        "rope_theta": 1e6}),
    (r"mistral-7b.*v0\.2", {**MISTRAL, "rope_theta": 1e6}),
    (r"mistral-7b.*v0\.3", {**MISTRAL, "rope_theta": 1e6, "vocab": 32768}),
    (r"mixtral-8x7b", {"preset": "mixtral-8x7b"}),
    (r"mixtral-8x22b", {"preset": "mixtral-8x7b", "layers": 56, "width": 6144, "heads": 48, "mlp": 16384,
                        "max_seq": 65536}),
    (r"qwen3-4b-(instruct|thinking)-2507", {**QWEN_3, "rope_theta": 5e6, "max_seq": 262144}),
    (r"qwen3-30b-a3b-(instruct|thinking)-2507|qwen3-coder-30b-a3b",
     {"preset": "qwen3-30b-a3b", "rope_theta": 1e7, "max_seq": 262144}),
    (r"qwen3-235b-a22b-(instruct|thinking)-2507", {**QWEN_235B, "rope_theta": 5e6, "max_seq": 262144}),
    (r"qwen3-0\.6b", {"preset": "qwen3-0.6b"}),
    (r"qwen3-1\.7b", {**QWEN_3, "layers": 28, "width": 2048, "heads": 16, "mlp": 6144}),
    (r"qwen3-4b", QWEN_3),
    (r"qwen3-8b", {**QWEN_3, "width": 4096, "mlp": 12288, "tie_embeddings": False}),
    (r"qwen3-14b", {**QWEN_3, "layers": 40, "width": 5120, "heads": 40, "mlp": 17408, "tie_embeddings": False}),
    (r"qwen3-32b", {**QWEN_3, "layers": 64, "width": 5120, "heads": 64, "mlp": 25600, "tie_embeddings": False}),
    (r"qwen3-30b-a3b", {"preset": "qwen3-30b-a3b"}),
    (r"qwen3-235b-a22b", QWEN_235B),
    (r"granite-20b-code", {"preset": "granite-20b"}),
    (r"granite-34b-code", {"preset": "granite-34b"}),
)  # fmt: skip
"""Regular expressions for a part of a name in lower case, with the model's keys; the first that matches counts."""


def named(name: str) -> dict[str, Any] | None:
    """The keys of `model` for a published model, such as NousResearch/Meta-Llama-3.1-8B; None for one not known."""
    plain = name.lower().replace("_", "-")
    return next((dict(keys) for pattern, keys in NAMES if re.search(rf"({pattern})(?![0-9])", plain)), None)


def folder(name: str, revision: str | None = None) -> dict[str, str]:
    """The keys of `model` for one whose sizes are not known here: its place on the hub, or its folder."""
    on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None
    return {"hf": f"hf:{name}" + (f"@{revision}" if revision else "") if on_hub else name}
