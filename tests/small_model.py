"""The small model of tests that build programs: it is captured in a moment, and has fewer KV heads than heads."""

from __future__ import annotations


def of_small_model(recipe: str, layers: int = 2, **sizes: object) -> str:
    """The text of a recipe with the model as its last line. sizes: further keys, or other values."""
    keys = {"preset": "tiny", "layers": layers, "width": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "mlp": 24,
            "vocab": 32, "seq_len": 8} | sizes  # fmt: skip
    return f"{recipe}model: {{{', '.join(f'{key}: {value}' for key, value in keys.items())}}}\n"
