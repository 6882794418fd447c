"""Llama: arithmetic with named dims, and nothing else (Touvron et al. 2023; the Llama 3 report, 2024)."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.kernels.attention import attention
from tpshard.models.dims import name
from tpshard.models.layers import Embedding, Linear, RMSNorm
from tpshard.models.presets import ModelConfig
from tpshard.models.rope import rotate, rotation

Rotation = tuple[Tensor, Tensor]


class Cache(Protocol):
    """What a server keeps of the past: it stores a layer's new keys and values and attends to all of them."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [batch, seq, heads, head_dim], k and v: [batch, seq, kv_heads, head_dim] -> as q, the needed rows"""
        ...

    def needed(self, layer: int, x: Tensor) -> Tensor:
        """x: [batch, seq, embed] -> its rows that are of use once this layer has stored keys and values of all: where
        it is the last one, those whose logits are asked for."""
        ...


class Attention(nn.Module):
    """Causal attention over grouped heads.   x: [batch, seq, embed] -> [batch, seq, embed]"""

    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, c.head_dim
        self.wq = Linear(c.width, c.heads * c.head_dim, dims=("heads", "embed"), bias=c.attention_bias)
        self.wk = Linear(c.width, c.kv_heads * c.head_dim, dims=("kv_heads", "embed"), bias=c.attention_bias)
        self.wv = Linear(c.width, c.kv_heads * c.head_dim, dims=("kv_heads", "embed"), bias=c.attention_bias)
        self.wo = Linear(c.heads * c.head_dim, c.width, dims=("embed", "heads"), bias=c.attention_bias)

    def forward(self, x: Tensor, turn: Rotation, documents: Tensor | None, cache: Cache | None) -> Tensor:
        q = rotate(self.wq(x).unflatten(-1, (-1, self.head_dim)), turn)
        k = rotate(self.wk(x).unflatten(-1, (-1, self.head_dim)), turn)
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        q = name(q, "q", "batch", "seq", "heads", "head_dim")
        k = name(k, "k", "batch", "seq", "kv_heads", "head_dim")
        v = name(v, "v", "batch", "seq", "kv_heads", "head_dim")
        out = attention(q, k, v, documents) if cache is None else cache.attend(self.layer, q, k, v)
        out = name(out, "attended", "batch", "seq", "heads", "head_dim")
        return self.wo(out.flatten(-2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)).   x: [batch, seq, embed] -> [batch, seq, embed]"""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(c.width, c.mlp, dims=("mlp", "embed"), bias=c.mlp_bias)
        self.up = Linear(c.width, c.mlp, dims=("mlp", "embed"), bias=c.mlp_bias)
        self.down = Linear(c.mlp, c.width, dims=("embed", "mlp"), bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = name(F.silu(self.gate(x)) * self.up(x), "hidden", "batch", "seq", "mlp")
        return self.down(hidden)


class Block(nn.Module):
    """Attention, then MLP, each on a normed copy of the residual stream.   x: [batch, seq, embed] -> the same"""

    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(c.width, c.norm_eps)
        self.attention = Attention(c, layer)
        self.mlp_norm = RMSNorm(c.width, c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, turn: Rotation, documents: Tensor | None, cache: Cache | None) -> Tensor:
        attended = self.attention(self.attention_norm(x), turn, documents, cache)
        x = (x if cache is None else cache.needed(self.attention.layer, x)) + attended
        x = name(x, "residual", "batch", "seq", "embed")
        x = x + self.mlp(self.mlp_norm(x))
        return name(x, "residual", "batch", "seq", "embed")


class Llama(nn.Module):
    """tokens: [batch, seq] int64 -> logits: [batch, seq, vocab]"""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config = c
        # 0.02 costs `tiny` half a nat after 60 steps; a table that is the head too must not saturate the softmax
        std = c.width**-0.5 if c.tie_embeddings else 0.3
        self.tok_embed = Embedding(c.vocab, c.width, dims=("vocab", "embed"), std=std)
        self.layers = nn.ModuleList(Block(c, i) for i in range(c.layers))
        self.norm = RMSNorm(c.width, c.norm_eps)
        self.output = None if c.tie_embeddings else Linear(c.width, c.vocab, dims=("vocab", "embed"))

    def forward(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """documents: [batch, seq] ids, attended within equal ids only; positions: [batch, seq], default 0, 1, 2, ..."""
        c = self.config
        x = name(self.tok_embed(tokens), "embedded", "batch", "seq", "embed")
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        turn = rotation(positions, c.head_dim, c.rope_theta, c.rope_scaling, x.dtype)
        for layer in self.layers:
            x = layer(x, turn, documents, cache)
        x = self.norm(x)
        logits = F.linear(x, self.tok_embed.weight) if self.output is None else self.output(x)
        return name(logits, "logits", "batch", "seq", "vocab")
