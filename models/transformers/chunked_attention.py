"""Llama 4's attention: within chunks in some layers, and with queries scaled by their position in the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = "tpshard_chunk"
"""The attribute of an attention module with the number of tokens within which it attends."""


def chunk_of(config: Any, layer: int) -> int | None:
    """The number of tokens within which a layer attends; None for a layer that attends to all."""
    types = getattr(config, "layer_types", None)
    return config.attention_chunk_size if types and types[layer] == "chunked_attention" else None


def within_chunks(documents: Tensor | None, positions: Tensor | None, like: Tensor, chunk: int) -> Tensor:
    """Document ids [batch, seq] that make each chunk of `chunk` tokens of a document a document of its own.

    positions: [batch, seq], the place of each token in its document. Without them, and without documents, the rows of
    `like` [batch, heads, seq, head_dim] are one document each.
    """
    batch, _, seq, _ = like.shape
    if positions is None:
        positions = torch.arange(seq, device=like.device).expand(batch, seq)
    chunks = positions // chunk
    return chunks if documents is None else documents * (-(-seq // chunk)) + chunks


def temper(positions: Tensor | None, query: Tensor, floor: float, scale: float) -> Tensor:
    """Queries [batch, seq, columns] times 1 + scale * log(1 + floor((position + 1) / floor)), which keeps attention
    over many keys sharp (Nakanishi 2025, https://arxiv.org/abs/2501.19399)."""
    if positions is None:
        positions = torch.arange(query.shape[1], device=query.device).expand(query.shape[:2])
    scales = torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * scale + 1.0
    return (query * scales.unsqueeze(-1)).to(query.dtype)
