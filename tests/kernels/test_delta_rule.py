"""The gated delta rule against its definition, token by token, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from tpshard.kernels.recurrences import delta_rule as module
from tpshard.kernels.recurrences.delta_rule import delta_rule


def inputs_of(tokens: int, channels: bool) -> list[Tensor]:
    b, h, i, o = 2, 3, 4, 5
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    decay = -draw(b, tokens, h, i if channels else 1).abs()
    q, k, v = draw(b, tokens, h, i), draw(b, tokens, h, i) * 0.5, draw(b, tokens, h, o)
    return [q, k, v, decay, draw(b, tokens, h).sigmoid(), draw(b, h, i, o)]


def token_by_token(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    outputs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t].exp().unsqueeze(-1)
        wrong = v[:, t] - (k[:, t].unsqueeze(-1) * state).sum(-2)
        state = state + k[:, t].unsqueeze(-1) * (beta[:, t].unsqueeze(-1) * wrong).unsqueeze(-2)
        outputs.append((q[:, t].unsqueeze(-1) * state).sum(-2))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 5, 11])
def test_chunks_are_the_tokens_one_by_one(tokens: int, channels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 4)
    own, expected = ([x.requires_grad_() for x in inputs_of(tokens, channels)] for _ in range(2))
    results, references = delta_rule(*own), token_by_token(*expected)
    torch.testing.assert_close(results, references)
    grads = [torch.cos(x.detach() * 3) for x in references]
    torch.testing.assert_close(
        torch.autograd.grad(results, own, grads), torch.autograd.grad(references, expected, grads)
    )


def test_shapes_that_do_not_match_are_refused() -> None:
    q, k, v, decay, beta, state = (x.to("meta") for x in inputs_of(3, False))
    with pytest.raises(ValueError, match="do not match"):
        delta_rule(q, k, v, decay, beta, state[..., :2])
    with pytest.raises(ValueError, match="decay"):
        delta_rule(q, k, v, decay.expand(-1, -1, -1, 3), beta, state)
