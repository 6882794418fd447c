"""Runs of operations that kernels stand for, and their likes that they do not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from tpshard.models.layers import RMSNorm
from tpshard.models.rope import rotate
from tpshard.serve.fusion import fuse

COS, SIN = torch.rand(1, 8, 1, 16), torch.rand(1, 8, 1, 16)


def root(x: Tensor, eps: float | Tensor = 0.25, dim: int = -1) -> Tensor:
    return torch.rsqrt((x * x).mean(dim, keepdim=True) + eps)


def models_norm(x: Tensor, w: Tensor) -> Tensor:
    norm = RMSNorm(64, 0.25)
    norm.weight = torch.nn.Parameter(w)
    return norm(x).detach()


def turned(x: Tensor, shift: int | tuple[int, ...] = 8, dims: int | tuple[int, ...] | None = -1) -> Tensor:
    heads = x.unflatten(-1, (-1, 16))
    return heads * COS + torch.roll(heads, shift, dims) * SIN


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 16))


RUNS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "norm": models_norm,
    "norm, its root used again": lambda x, w: x * root(x) * w + root(x),
    "norm, by weights of its own for each row": lambda x, w: x * root(x) * (x + w),
    "rotation": lambda x, _: rotate(heads(x), (COS, SIN)),
    "gate": lambda x, w: F.silu(x) * (x + w),
    "gate, silu used again": lambda x, w: (lambda silu: silu * (x + w) + silu)(F.silu(x)),
    "gate of another shape": lambda x, w: F.silu(x) * w,
}
LIKES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "over rows": lambda x, w: x * root(x, dim=1) * w,
    "a tensor as eps": lambda x, w: x * root(x, w[:1].abs()) * w,
    "eps twice": lambda x, w: x * torch.rsqrt(torch.add((x * x).mean(-1, keepdim=True), 0.25, alpha=2)) * w,
    "a number as weight": lambda x, _: x * root(x) * 2.0,
    "widened and shifted": lambda x, w: (lambda v: (v * root(v)).bfloat16() * w.bfloat16())(x.double() + 3),
    "widened later": lambda x, w: (x * root(x)).double() * w.double(),
    "a quarter": lambda x, _: turned(x, 4),
    "the other way": lambda x, _: turned(x, -8),
    "two dims": lambda x, _: turned(x, (8, 1), (-1, 1)),
    "no dim": lambda x, _: turned(x, 8, None),
    "sin twice": lambda x, _: torch.add(heads(x) * COS, torch.roll(heads(x), 8, -1) * SIN, alpha=2),
    "numbers": lambda x, _: heads(x) * 2.0 + torch.roll(heads(x), 8, -1) * 3.0,
    "half a gate": lambda x, _: F.silu(x) * 2.0,
}


@pytest.mark.parametrize("name", [*RUNS, *LIKES])
def test_what_is_fused_computes_the_same(name: str) -> None:
    run = (RUNS | LIKES)[name]
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(1, 8, 64, generator=generator), torch.randn(64, generator=generator)
    traced = make_fx(run)(x, w)
    found = fuse(traced.graph, torch.device("cpu"))
    assert sum(found.values()) == (name in RUNS)
    traced.graph.lint()
    traced.recompile()
    y, expected = traced(x, w), run(x, w)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("blocks", "also", "folded"), [(1, lambda y: 0, True), (2, lambda y: 0, False), (1, lambda y: y.sum(), False)]
)
def test_a_norm_stores_in_the_one_order_in_which_it_is_read(
    blocks: int, also: Callable[[Tensor], Tensor | int], folded: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(1, 8, 64, generator=generator), torch.randn(64, generator=generator)
    order = torch.randperm(64 // blocks, generator=generator).repeat(blocks)

    def run(x: Tensor, w: Tensor, order: Tensor) -> Tensor:
        y = x * root(x) * w
        return torch.ops.tpshard.reorder(y, order, blocks) + also(y)

    traced = make_fx(run)(x, w, order)
    assert fuse(traced.graph, torch.device("cpu")) == {"norm": 1, "order": int(folded), "rotation": 0, "gate": 0}
    traced.graph.lint()
    traced.recompile()
    assert ("reorder" in traced.code) == (not folded)
    torch.testing.assert_close(traced(x, w, order), run(x, w, order), rtol=1e-5, atol=1e-5)
