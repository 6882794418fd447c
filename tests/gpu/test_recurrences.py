"""Recurrences and pools of states on a device equal those of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from tpshard.kernels.recurrences.delta_rule import FEW, delta_rule
from tpshard.kernels.recurrences.selective_scan import selective_scan
from tpshard.kernels.recurrences.state_pool import READ_STATE, WRITE_STATE


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def delta_inputs(channels: int, t: int = 150) -> list[Tensor]:
    b, h, i, o = 2, 4, 16, 24
    q, k = draw(b, t, h, i), torch.nn.functional.normalize(draw(b, t, h, i + 1)[..., 1:], dim=-1)
    return [q, k, draw(b, t, h, o), -draw(b, t, h, channels).abs(), draw(b, t, h).sigmoid(), draw(b, h, i, o)]


def scan_inputs() -> list[Tensor]:
    b, t, d, n = 2, 150, 12, 8
    return [
        draw(b, t, d),
        draw(b, t, d).abs(),
        -draw(d, n).abs(),
        draw(b, t, n),
        draw(b, t, n + 1)[..., 1:],
        draw(b, d, n),
    ]


@pytest.mark.parametrize("which", ["delta", "delta of channels", "delta of few tokens", "scan"])
def test_a_recurrence_and_its_gradients(which: str, device: str) -> None:
    operation = selective_scan if which == "scan" else delta_rule
    tokens = FEW if "few" in which else 150  # a GPU computes few one after another, more in chunks
    inputs = scan_inputs() if which == "scan" else delta_inputs(16 if "channels" in which else 1, tokens)
    runs = []
    for place in ("cpu", device):
        own = [x.to(place).requires_grad_() for x in inputs]
        results = operation(*own)
        grads = torch.autograd.grad(results, own, [torch.cos(x.detach()) for x in results])
        runs.append([x.detach().cpu() for x in (*results, *grads)])
    for reference, value in zip(*runs, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-3, atol=1e-3 * float(reference.abs().max()))


def test_states_are_read_and_written(device: str) -> None:
    pool, values = draw(5, 3, 4).to(device), draw(2, 3, 4).to(device)
    states, positions = torch.tensor([3, 1], device=device), torch.tensor([[7, 0]], device=device)
    before = pool.clone()
    read = READ_STATE(pool, states, positions)
    assert torch.equal(read[0], before[3]) and not read[1].any()
    assert torch.equal(WRITE_STATE(pool, states, values), states)
    before[states] = values
    assert torch.equal(pool, before)
