"""Mamba's selective scan against its definition, token by token, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from tpshard.kernels.recurrences import selective_scan as module
from tpshard.kernels.recurrences.selective_scan import selective_scan


def inputs_of(tokens: int) -> list[Tensor]:
    b, d, n = 2, 3, 4
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    step = draw(b, tokens, d).abs()
    return [draw(b, tokens, d), step, -draw(d, n).abs(), draw(b, tokens, n), draw(b, tokens, n), draw(b, d, n)]


def token_by_token(
    x: Tensor, step: Tensor, a: Tensor, inward: Tensor, outward: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    outputs = []
    for t in range(x.shape[1]):
        state = (step[:, t].unsqueeze(-1) * a).exp() * state + (step * x)[:, t].unsqueeze(-1) * inward[:, t].unsqueeze(
            1
        )
        outputs.append((state * outward[:, t].unsqueeze(1)).sum(-1))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("tokens", [1, 4, 5, 11])
def test_chunks_are_the_tokens_one_by_one(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 4)
    own, expected = ([x.requires_grad_() for x in inputs_of(tokens)] for _ in range(2))
    results, references = selective_scan(*own), token_by_token(*expected)
    torch.testing.assert_close(results, references)
    grads = [torch.cos(x.detach() * 3) for x in references]
    actual = torch.autograd.grad(results, own, grads)
    torch.testing.assert_close(actual, torch.autograd.grad(references, expected, grads))
    assert all(x.is_contiguous() for x in (*results, *actual))


def test_shapes_that_do_not_match_are_refused() -> None:
    x, step, a, inward, outward, state = (each.to("meta") for each in inputs_of(3))
    with pytest.raises(ValueError, match="do not match"):
        selective_scan(x, step, a, inward, outward[:, :2], state)
