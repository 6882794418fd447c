"""Published models as the keys of a recipe's `model`."""

from __future__ import annotations

import re
from typing import Any

LLAMA = {"preset": "llama3-8b"}
PLAIN_ROPE: dict[str, Any] = {"rope_scaling": {"factor": 1}}
"""Llama 3.0 and 2: rotary positions without the scaling that the presets, Llama 3.1, have."""
LLAMA_2 = {**LLAMA, **PLAIN_ROPE, "rope_theta": 10000.0, "max_seq": 4096, "vocab": 32000}
MISTRAL = {**LLAMA, **PLAIN_ROPE, "rope_theta": 10000.0, "vocab": 32000, "max_seq": 32768}
QWEN_3 = {"preset": "qwen3-4b"}

NAMES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"llama-?3\.2-1b", {"preset": "llama3-1b"}),
    (r"llama-?3\.2-3b", {**LLAMA, "layers": 28, "width": 3072, "heads": 24, "mlp": 8192, "tie_embeddings": True,
                         "rope_scaling": {"factor": 32}}),
    (r"llama-?3\.1-8b", LLAMA),
    (r"llama-?3\.[13]-70b", {"preset": "llama3-70b"}),
    (r"llama-?3\.1-405b", {"preset": "llama3-405b"}),
    (r"llama-?3-8b", {**LLAMA, **PLAIN_ROPE, "max_seq": 8192}),
    (r"llama-?3-70b", {"preset": "llama3-70b", **PLAIN_ROPE, "max_seq": 8192}),
    (r"(llama-?2|codellama)-7b", {**LLAMA_2, "kv_heads": 32, "mlp": 11008}),
    (r"(llama-?2|codellama)-13b", {**LLAMA_2, "layers": 40, "width": 5120, "heads": 40, "kv_heads": 40, "mlp": 13824}),
    (r"llama-?2-70b", {**LLAMA_2, "layers": 80, "width": 8192, "heads": 64, "mlp": 28672}),
    (r"tinyllama.*1\.1", {**LLAMA_2, "layers": 22, "width": 2048, "kv_heads": 4, "head_dim": 64, "mlp": 5632}),
    (r"smollm2-135m", {**LLAMA, **PLAIN_ROPE, "layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "head_dim": 64,
                       "mlp": 1536, "vocab": 49152, "max_seq": 8192, "rope_theta": 100000.0, "tie_embeddings": True}),
    (r"mistral-7b-v0\.1", {**MISTRAL, "window": 4096}),
    (r"mistral-7b.*v0\.2", {**MISTRAL, "rope_theta": 1e6}),
    (r"mistral-7b.*v0\.3", {**MISTRAL, "rope_theta": 1e6, "vocab": 32768}),
    (r"mixtral-8x7b", {"preset": "mixtral-8x7b"}),
    (r"mixtral-8x22b", {"preset": "mixtral-8x7b", "layers": 56, "width": 6144, "heads": 48, "mlp": 16384,
                        "max_seq": 65536}),
    (r"qwen3-0\.6b", {"preset": "qwen3-0.6b"}),
    (r"qwen3-1\.7b", {**QWEN_3, "layers": 28, "width": 2048, "heads": 16, "mlp": 6144}),
    (r"qwen3-4b", QWEN_3),
    (r"qwen3-8b", {**QWEN_3, "width": 4096, "mlp": 12288, "tie_embeddings": False}),
    (r"qwen3-14b", {**QWEN_3, "layers": 40, "width": 5120, "heads": 40, "mlp": 17408, "tie_embeddings": False}),
    (r"qwen3-32b", {**QWEN_3, "layers": 64, "width": 5120, "heads": 64, "mlp": 25600, "tie_embeddings": False}),
    (r"qwen3-30b-a3b", {"preset": "qwen3-30b-a3b"}),
    (r"qwen3-235b-a22b", {"preset": "qwen3-30b-a3b", "layers": 94, "width": 4096, "heads": 64, "mlp": 1536}),
)  # fmt: skip
"""Regular expressions for a part of a name in lower case, with the model's keys; the first that matches counts."""


def named(name: str) -> dict[str, Any] | None:
    """The keys of `model` for a published model, such as NousResearch/Meta-Llama-3.1-8B; None for one not known."""
    plain = name.lower().replace("_", "-")
    return next((dict(keys) for pattern, keys in NAMES if re.search(rf"{pattern}(?![0-9])", plain)), None)
