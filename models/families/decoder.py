"""The decoder of every tpshard family, as arithmetic on tensors with named dims.

A layer is attention and an MLP, each applied to a normed copy of the residual stream. The family's entry in
`models.catalog` says which parts it has and how its parameters are named.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from tpshard.kernels.attention.attention import attention
from tpshard.models.dims import name
from tpshard.models.families.config import ModelConfig
from tpshard.models.families.layers import Linear, Parts
from tpshard.models.families.mlp import MLPS
from tpshard.models.families.rope import rotate, rotation
from tpshard.models.objectives.chunked_head import Unprojected, project

Rotation = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Causal attention with grouped KV heads, and with a window or normed queries and keys where the family has them.

    x: [batch, seq, embed] -> [batch, seq, embed]
    """

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.head_dim, self.window = parts.config.head_dim, parts.config.window_of(layer)
        self.wq, self.wk, self.wv, self.wo = map(parts, ("wq", "wk", "wv", "wo"))
        self.q_norm, self.k_norm = parts.optional("q_norm"), parts.optional("k_norm")

    def forward(self, x: Tensor, turn: Rotation | None, documents: Tensor | None) -> Tensor:
        """x [batch, seq, embed]; `turn` applies rotary positions, `documents` [batch, seq] mask attention."""
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        q = name(q, "q", "batch", "seq", "heads", "head_dim")
        k = name(k, "k", "batch", "seq", "kv_heads", "head_dim")
        v = name(v, "v", "batch", "seq", "kv_heads", "head_dim")
        out = attention(q, k, v, documents, window=self.window)
        out = name(out, "attended", "batch", "seq", "heads", "head_dim")
        return self.wo(out.flatten(-2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A layer: attention, then MLP, each on a normed copy of the residual stream.   x: [batch, seq, embed] -> the
    same"""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.attention_norm = parts("attention_norm")
        self.attention = Attention(parts.inside("attention"), layer)
        self.mlp_norm = parts("mlp_norm")
        self.mlp = MLPS[parts.config.family_entry.mlp](parts.inside("mlp"))

    def forward(self, x: Tensor, turn: Rotation | None, documents: Tensor | None) -> Tensor:
        """x [batch, seq, embed] -> [batch, seq, embed]."""
        x = x + self.attention(self.attention_norm(x), turn, documents)
        x = name(x, "residual", "batch", "seq", "embed")
        x = x + self.mlp(self.mlp_norm(x))
        return name(x, "residual", "batch", "seq", "embed")


class Decoder(nn.Module):
    """The model: tokens [batch, seq] int64 -> logits [batch, seq, vocab]"""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config = c
        parts = Parts(c)
        # 0.02 costs `tiny` 0.5 nats after 60 steps; a table that is also the head must not saturate the softmax
        std = c.width**-0.5 if c.tie_embeddings else 0.3
        self.tok_embed = parts("tok_embed", std=std)
        self.pos_embed = parts.optional("pos_embed", std=std / 2)
        self.layers = nn.ModuleList(Block(parts.inside(f"layers.{i}"), i) for i in range(c.layers))
        self.norm = parts("norm")
        self.output = parts.optional("output")
        if self.output is not None:
            self.output.product = project  # type: ignore[assignment]

    def give_head(self) -> None:
        """Makes a head whose weight is the embeddings' table a layer of its own, such as one that has an adapter."""
        c = self.config
        self.output = Linear(c.width, c.vocab, ("vocab", "embed"))
        self.output.weight = self.tok_embed.weight  # type: ignore[assignment]
        self.output.product = project

    def forward(
        self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor | Unprojected:
        """Logits [batch, seq, vocab], or the head's input for a loss in chunks.

        documents: [batch, seq] ids; tokens attend only within their document.

        positions: [batch, seq], default 0, 1, 2, ... ValueError if these exceed a table of learned positions.
        """
        c = self.config
        if positions is None:
            if self.pos_embed is not None and tokens.shape[1] > c.max_seq:
                raise ValueError(f"{tokens.shape[1]} tokens are more than the {c.max_seq} learned positions")
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        x, turn = self.tok_embed(tokens), None
        if self.pos_embed is not None:
            x = x + self.pos_embed(positions)
        x = name(x, "embedded", "batch", "seq", "embed")
        if self.pos_embed is None:
            turn = rotation(positions, c.head_dim, c.rope_theta, c.rope_scaling, x.dtype)
        for layer in self.layers:
            x = layer(x, turn, documents)
        x = self.norm(x)
        logits = project(x, self.tok_embed.weight) if self.output is None else self.output(x)  # type: ignore[arg-type]
        return logits if isinstance(logits, Unprojected) else name(logits, "logits", "batch", "seq", "vocab")
