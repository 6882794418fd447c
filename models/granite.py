"""Granite's code models of 20B and 34B, GPTBigCode by architecture: multi-query, GELU, biases, learned positions
(Mishra et al. 2024; Li et al. 2023)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.kernels.attention import attention
from tpshard.models.dims import name
from tpshard.models.layers import Embedding, LayerNorm, Linear
from tpshard.models.llama import Cache
from tpshard.models.presets import ModelConfig


class Attention(nn.Module):
    """Causal attention whose query heads share few KV heads.   x: [batch, seq, embed] -> [batch, seq, embed]"""

    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, c.head_dim
        self.wq = Linear(c.width, c.heads * c.head_dim, dims=("heads", "embed"), bias=c.attention_bias)
        self.wk = Linear(c.width, c.kv_heads * c.head_dim, dims=("kv_heads", "embed"), bias=c.attention_bias)
        self.wv = Linear(c.width, c.kv_heads * c.head_dim, dims=("kv_heads", "embed"), bias=c.attention_bias)
        self.wo = Linear(c.heads * c.head_dim, c.width, dims=("embed", "heads"), bias=c.attention_bias)

    def forward(self, x: Tensor, documents: Tensor | None, cache: Cache | None) -> Tensor:
        q = name(self.wq(x).unflatten(-1, (-1, self.head_dim)), "q", "batch", "seq", "heads", "head_dim")
        k = name(self.wk(x).unflatten(-1, (-1, self.head_dim)), "k", "batch", "seq", "kv_heads", "head_dim")
        v = name(self.wv(x).unflatten(-1, (-1, self.head_dim)), "v", "batch", "seq", "kv_heads", "head_dim")
        out = attention(q, k, v, documents) if cache is None else cache.attend(self.layer, q, k, v)
        out = name(out, "attended", "batch", "seq", "heads", "head_dim")
        return self.wo(out.flatten(-2))


class MLP(nn.Module):
    """down(gelu(up(x))).   x: [batch, seq, embed] -> [batch, seq, embed]"""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(c.width, c.mlp, dims=("mlp", "embed"), bias=c.mlp_bias)
        self.down = Linear(c.mlp, c.width, dims=("embed", "mlp"), bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = name(F.gelu(self.up(x), approximate="tanh"), "hidden", "batch", "seq", "mlp")
        return self.down(hidden)


class Block(nn.Module):
    """Attention, then MLP, each on a normed copy of the residual stream.   x: [batch, seq, embed] -> the same"""

    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(c.width, c.norm_eps)
        self.attention = Attention(c, layer)
        self.mlp_norm = LayerNorm(c.width, c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, documents: Tensor | None, cache: Cache | None) -> Tensor:
        attended = self.attention(self.attention_norm(x), documents, cache)
        x = (x if cache is None else cache.needed(self.attention.layer, x)) + attended
        x = name(x, "residual", "batch", "seq", "embed")
        x = x + self.mlp(self.mlp_norm(x))
        return name(x, "residual", "batch", "seq", "embed")


class Granite(nn.Module):
    """tokens: [batch, seq] int64 -> logits: [batch, seq, vocab]"""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config = c
        std = c.width**-0.5 if c.tie_embeddings else 0.3
        self.tok_embed = Embedding(c.vocab, c.width, dims=("vocab", "embed"), std=std)
        self.pos_embed = Embedding(c.max_seq, c.width, dims=("positions", "embed"), std=std / 2)
        self.layers = nn.ModuleList(Block(c, i) for i in range(c.layers))
        self.norm = LayerNorm(c.width, c.norm_eps)
        self.output = None if c.tie_embeddings else Linear(c.width, c.vocab, dims=("vocab", "embed"))

    def forward(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """documents: [batch, seq] ids, attended within equal ids only; positions: [batch, seq], default 0, 1, 2, ...

        ValueError if the default positions run beyond `max_seq`: there is no row for them.
        """
        if positions is None:
            if tokens.shape[1] > self.config.max_seq:
                raise ValueError(f"{tokens.shape[1]} tokens are more than the {self.config.max_seq} learned positions")
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        x = self.tok_embed(tokens) + self.pos_embed(positions)
        x = name(x, "embedded", "batch", "seq", "embed")
        for layer in self.layers:
            x = layer(x, documents, cache)
        x = self.norm(x)
        logits = F.linear(x, self.tok_embed.weight) if self.output is None else self.output(x)
        return name(logits, "logits", "batch", "seq", "vocab")
