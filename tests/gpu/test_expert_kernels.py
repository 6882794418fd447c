"""Experts on a device equal those of the CPU, with gradients, and wait for nothing on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from tpshard.kernels.experts.expert_linear import expert_linear
from tpshard.kernels.experts.experts import experts, fixed_rows_experts

ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def routed(rows: int, k: int, e: int, h: int, m: int) -> list[Tensor]:
    """x, ids, weights, gate, up and down; some ids belong to another device."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.rand(rows, e + 2, generator=generator).topk(k, -1).indices - 1
    shapes = (rows, m), (rows, k), (e, h, m), (e, h, m), (e, m, h)
    x, weights, *matrices = (torch.randn(shape, generator=generator) for shape in shapes)
    return [x, ids, weights.softmax(-1), *(matrix * matrix.shape[2] ** -0.5 for matrix in matrices)]


@contextmanager
def no_waiting() -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("rows", [1, 40, 700, 3000])
@pytest.mark.parametrize("operation", ["experts", "expert_linear"])
def test_experts_and_their_gradients(operation: str, rows: int, dtype: torch.dtype, device: str) -> None:
    given = routed(rows, 2, 8, 256, 384)
    if operation == "expert_linear":
        given = [given[0].unsqueeze(1), given[1], given[3]]
    run, runs = experts if operation == "experts" else expert_linear, []
    for place, kind in (("cpu", torch.float64), (device, dtype)):
        own = [x.to(place) if i == 1 else x.to(place, dtype).to(kind).requires_grad_() for i, x in enumerate(given)]
        run(*own)  # compiles what is to wait for nothing
        with no_waiting():
            result = run(*own)
            dout = torch.ones_like(result) * 0.5
            grads = torch.autograd.grad(result, [x for i, x in enumerate(own) if i != 1], dout)
        runs.append([x.detach().cpu().double() for x in (result, *grads)])
    for reference, value in zip(*runs, strict=True):
        assert (value - reference).norm() <= ROUNDING[dtype] * reference.norm()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_a_token_has_the_same_bits_in_every_batch(dtype: torch.dtype, device: str) -> None:
    given = [x.to(device) if i == 1 else x.to(device, dtype) for i, x in enumerate(routed(300, 2, 8, 256, 384))]
    together = fixed_rows_experts(*given)
    for rows in (slice(1), slice(7, 40)):
        alone = fixed_rows_experts(*(x[rows] for x in given[:3]), *given[3:])
        assert torch.equal(alone, together[rows])
