"""The head's product left to the loss, which computes it for a part of the tokens at a time.

Logits of all tokens are often a step's largest tensors (8,192 tokens x 128,256 words in fp32: 3.9 GiB, and their
gradient once more). With `loss.chunks: n` there are only those of every n-th token at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

_chunks: ContextVar[int] = ContextVar("chunks", default=1)


@dataclass(frozen=True)
class Unprojected:
    """What a model returns in place of logits [batch, seq, vocab]: the head's input and its parameters."""

    hidden: Tensor
    """[batch, seq, embed]"""
    weight: Tensor
    """[vocab, embed]"""
    bias: Tensor | None
    """[vocab]"""
    chunks: int


@contextmanager
def in_chunks(chunks: int) -> Iterator[None]:
    """A context in which models whose head is computed by `project` leave it to the loss, in so many parts; 1: none."""
    token = _chunks.set(chunks)
    try:
        yield
    finally:
        _chunks.reset(token)


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Logits, hidden @ weight.T + bias, or within `in_chunks` what is needed to compute them.

    hidden: [batch, seq, embed], weight: [vocab, embed] -> [batch, seq, vocab]
    """
    if _chunks.get() == 1:
        return F.linear(hidden, weight, bias)
    return Unprojected(hidden, weight, bias, _chunks.get())


class Head(nn.Linear):
    """A linear layer that computes logits by `project`."""

    def forward(self, input: Tensor) -> Any:
        return project(input, self.weight, self.bias)


def leave_to_loss(head: nn.Module) -> None:
    """Lets a linear layer, the head of a model of transformers, compute its logits by `project`."""
    if type(head) is nn.Linear:
        head.__class__ = Head
