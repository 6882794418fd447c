"""On a server an indexer's own code selects among cached keys, or is refused by what it does otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.kernels.attention.paged_selection import SELECT
from tpshard.models.transformers import patch_indexers
from tpshard.models.transformers.attention_interface import explicit_mask
from tpshard.models.transformers.patch_attention import Step
from tpshard.parallelism.graph import Graph
from tpshard.parallelism.tracing.capture import capture


class Indexer(nn.Module):
    """Scores as transformers' indexers compute them; `changes` replaces some of the steps."""

    index_topk = 3

    def __init__(self, **changes: Callable[..., Any]) -> None:
        super().__init__()
        self.changes = changes

    def forward(
        self, query: Tensor, keys: Tensor, weights: Tensor, attention_mask: Tensor, cache: Any = None
    ) -> Tensor:
        def step(name: str, own: Callable[..., Any], *args: Any) -> Any:
            return self.changes.get(name, own)(*args)

        if cache is not None:
            keys = cache.update_indexer(keys, 0)
        keys = step("columns", lambda k: k.transpose(-1, -2).float().unsqueeze(1), keys)
        scores = step("scale", lambda s: s * 0.25, torch.matmul(query, keys))
        scores = step("relu", F.relu, scores)
        scores = step("weigh", lambda w, s: torch.matmul(w.unsqueeze(-2), s), weights, scores)
        scores = step("squeeze", lambda s: s.squeeze(-2), scores)
        scores = step("mask", lambda s, m: s.masked_fill(~m, float("-inf")), scores, attention_mask)
        return step("topk", lambda s: s.topk(min(self.index_topk, s.shape[-1]), dim=-1).indices, scores).to(torch.int32)


def captured(longest: int = 64, **changes: Callable[..., Any]) -> Graph:
    """The graph of a server's indexer of two heads of four, on six rows."""
    indexer = Indexer(**changes)
    step = indexer.tpshard_step = Step(longest=longest)  # type: ignore[assignment]
    patch_indexers.take_place(indexer)

    def select(query: Tensor, keys: Tensor, weights: Tensor) -> Any:
        step.mask = explicit_mask(keys[..., 0], None)
        return indexer(query, keys, weights, step.mask[:, 0, :, :])

    return capture(select, [torch.empty(1, 6, 2, 4), torch.empty(1, 6, 4), torch.empty(1, 6, 2)])


def _plain(scores: Any) -> Any:
    return scores


@pytest.mark.parametrize(("longest", "count", "scale"), [(64, 3, 0.25), (2, 2, 0.25), (64, 3, 1.0)])
def test_an_indexer_becomes_one_operation_on_its_queries_keys_and_weights(
    longest: int, count: int, scale: float
) -> None:
    """Without a scale of its own, as in HY-V4, it is 1. No more keys are selected than a sequence may have."""
    graph = captured(longest, **({"scale": _plain} if scale == 1.0 else {}))
    (op,) = (op for op in graph.ops if op.target is SELECT)
    assert op.args[3:] == (scale, count) and op.results == graph.outputs and op.results[0].shape == (1, 6, count)
    shapes = [value.shape for value in op.operands]
    assert shapes == [(1, 6, 2, 4), (1, 6, 1, 4), (1, 6, 2)]


@pytest.mark.parametrize(
    ("step", "change", "said"),
    [
        ("columns", lambda k: k.float().unsqueeze(2), "`unsqueeze` after `update_indexer`"),
        ("columns", lambda k: k.flip(1), "`flip` after `update_indexer`"),
        (
            "scale",
            lambda s: s + 0.25,
            "Indexer selects cached keys in a way that a server does not support: unsupported",
        ),
        ("scale", lambda s: s * torch.ones(1), "`mul` after `matmul`"),
        ("scale", lambda s: F.relu(s) * 0.25, "`mul` after `relu`"),
        ("relu", torch.sigmoid, "`sigmoid` after `mul`"),
        ("relu", _plain, "`weigh` after `mul`"),
        ("weigh", lambda w, s: s, "`squeeze` after `relu`"),
        ("weigh", lambda w, s: torch.matmul(s, w), "`matmul` after `relu`"),
        ("squeeze", lambda s: s.sum(2), "`sum` after `weigh`"),
        ("mask", lambda s, m: s, "`topk` after `squeeze`"),
        ("mask", lambda s, m: s.masked_fill(m, float("-inf")), "`masked_fill` after `squeeze`"),
        ("mask", lambda s, m: s.masked_fill(m.logical_not(), float("-inf")), "object has no attribute 'logical_not'"),
        ("mask", lambda s, m: s.masked_fill(~m, 0.0), "`masked_fill` after `squeeze`"),
        ("topk", lambda s: s.topk(3, dim=1).indices, "`topk` after `masked_fill`"),
        ("topk", lambda s: s.argsort(-1), "`argsort` after `masked_fill`"),
    ],
)
def test_what_the_operation_does_not_compute_is_refused(step: str, change: Callable[..., Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        captured(**{step: change})
