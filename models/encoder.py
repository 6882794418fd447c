"""An encoder like BERT (Devlin et al. 2018): learned positions, bidirectional attention within documents, GELU.

model: {module: "tpshard.models.encoder:Encoder", args: {vocab: 2048, max_seq: 128}, seq_len: 128}
task: mlm
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.models.dims import name
from tpshard.models.families.layers import Embedding, LayerNorm, Linear
from tpshard.models.objectives.chunked_head import project


def attend_both_ways(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
    """Softmax attention to all positions, or to those of the same document with `documents` [batch, seq].

    q, k, v: [batch, seq, heads, head_dim] -> [batch, seq, heads, head_dim]
    """
    scores = torch.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
    if documents is not None:
        same = documents.unsqueeze(2) == documents.unsqueeze(1)
        scores = scores.masked_fill(~same.unsqueeze(1), float("-inf"))
    return torch.einsum("bhst,bthd->bshd", torch.softmax(scores, -1), v)


class BothWays(nn.Module):
    """Bidirectional multi-head attention.   x: [batch, seq, embed] -> [batch, seq, embed]"""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (Linear(width, width, ("heads", "embed"), bias=True) for _ in range(3))
        self.out = Linear(width, width, ("embed", "heads"), bias=True)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        b, s, width = x.shape
        q, k, v = (one(x).view(b, s, self.heads, width // self.heads) for one in (self.q, self.k, self.v))
        attended = attend_both_ways(q, k, v, documents)
        return self.out(name(attended, "attended", "batch", "seq", "heads", "head_dim").reshape(b, s, width))


class EncoderBlock(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)).   x: [batch, seq, embed] -> [batch, seq, embed]"""

    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = LayerNorm(width, 1e-5), BothWays(width, heads)
        self.mlp_norm = LayerNorm(width, 1e-5)
        self.up, self.down = Linear(width, mlp, ("mlp", "embed"), True), Linear(mlp, width, ("embed", "mlp"), True)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), documents)
        return name(x + self.down(F.gelu(self.up(self.mlp_norm(x)))), "residual", "batch", "seq", "embed")


class Encoder(nn.Module):
    """The model: tokens, documents, positions, all [batch, seq] int64 -> logits [batch, seq, vocab]"""

    def __init__(
        self, vocab: int, max_seq: int, layers: int = 4, width: int = 128, heads: int = 8, mlp: int = 512
    ) -> None:
        super().__init__()
        self.tok_embed = Embedding(vocab, width, ("vocab", "embed"), 1.0)
        self.pos_embed = Embedding(max_seq, width, ("positions", "embed"), 0.1)
        self.layers = nn.ModuleList(EncoderBlock(width, heads, mlp) for _ in range(layers))
        self.norm, self.output = LayerNorm(width, 1e-5), Linear(width, vocab, ("vocab", "embed"))
        self.output.product = project

    def forward(self, tokens: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        """Token ids, documents and positions [batch, seq] -> logits [batch, seq, vocab], or a head left to the loss."""
        x = self.tok_embed(tokens) + self.pos_embed(positions)
        for block in self.layers:
            x = block(x, documents)
        return self.output(self.norm(x))
