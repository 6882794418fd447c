"""Moving tokens to slots and back equals products with one-hot tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from tpshard.kernels.experts.slots import from_slots, to_slots


def routes(b: int, s: int, k: int, n: int) -> Tensor:
    """Random slots, unique within a sequence; some tokens have none."""
    g = torch.Generator().manual_seed(n)
    result = torch.stack([torch.randperm(max(n, s * k), generator=g)[: s * k] for _ in range(b)]).view(b, s, k)
    return torch.where(result < n, result, -1)


def one_hot(slots: Tensor, n: int) -> Tensor:
    return (slots.unsqueeze(-1) == torch.arange(n)).double()  # [b, s, k, n]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("b", "s", "k", "n"), [(2, 7, 2, 10), (1, 5, 3, 40), (3, 4, 1, 2)])
def test_equals_products_with_one_hot_tensors(b: int, s: int, k: int, n: int, weighted: bool) -> None:
    g = torch.Generator().manual_seed(s)
    slots, m = routes(b, s, k, n), 6
    assert (slots < 0).any() or n >= s * k
    x, y = (torch.randn(b, rows, m, generator=g, dtype=torch.float64, requires_grad=True) for rows in (s, n))
    weights = torch.randn(b, s, k, generator=g, dtype=torch.float64, requires_grad=True) if weighted else None

    def share() -> Tensor:
        return one_hot(slots, n) * (1.0 if weights is None else weights.unsqueeze(-1))

    pairs = [
        (to_slots(x, slots, n, weights), torch.einsum("bskn,bsm->bnm", share(), x), x),
        (from_slots(y, slots, weights), torch.einsum("bskn,bnm->bsm", share(), y), y),
    ]
    for actual, expected, tensor in pairs:
        torch.testing.assert_close(actual, expected)
        dout, leaves = torch.randn_like(actual), [tensor] if weights is None else [tensor, weights]
        for ours, theirs in zip(torch.autograd.grad(actual, leaves, dout), torch.autograd.grad(expected, leaves, dout)):
            torch.testing.assert_close(ours, theirs)


def test_half_precision_is_summed_in_float() -> None:
    slots, n = routes(2, 9, 4, 40), 40
    y, weights = torch.randn(2, n, 8).bfloat16(), torch.rand(2, 9, 4)
    actual = from_slots(y, slots, weights)
    exact = torch.einsum("bskn,bnm->bsm", one_hot(slots, n) * weights.double().unsqueeze(-1), y.double())
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), exact, rtol=2**-8, atol=1e-3)


def test_registration() -> None:
    slots = routes(2, 5, 2, 7)
    x, y, weights = (torch.randn(shape, requires_grad=True) for shape in ((2, 5, 3), (2, 7, 3), (2, 5, 2)))
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.tpshard.to_slots.default, (x, slots, weights, 7), test_utils=checks)
    torch.library.opcheck(torch.ops.tpshard.from_slots.default, (y, slots, weights), test_utils=checks)
    with torch.no_grad():
        torch.library.opcheck(torch.ops.tpshard.slot_products.default, (x, y, slots), test_utils=checks[:2])
