"""Experts as one operation equal the weighted sum of every expert over all tokens, and their parts add up to it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels.experts.experts import experts

OP, BACKWARD = torch.ops.tpshard.experts, torch.ops.tpshard.experts_backward
SHAPES = [  # rows, choices, experts, hidden, width
    ((2, 7), 2, 4, 5, 6),
    ((9,), 3, 8, 16, 8),
    ((1, 1), 1, 3, 4, 4),
    ((3, 5), 2, 32, 2, 3),  # most experts get nothing
]


def inputs(rows: tuple[int, ...], k: int, e: int, h: int, m: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(e)
    ids = torch.rand(*rows, e, generator=g).topk(k, -1).indices
    sizes = [(*rows, m), (*rows, k), (e, h, m), (e, h, m), (e, m, h)]
    x, weights, *matrices = (torch.randn(size, generator=g, dtype=torch.float64).to(dtype) for size in sizes)
    return [x, ids, weights, *matrices]


def plain(x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = F.silu(torch.einsum("...m,ehm->...eh", x, gate)) * torch.einsum("...m,ehm->...eh", x, up)
    chosen = F.one_hot(ids, gate.shape[0]).to(x.dtype)
    share = torch.einsum("...k,...ke->...e", weights.to(x.dtype), chosen)
    return torch.einsum("...eh,emh,...e->...m", hidden, down, share)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_every_expert_over_all_tokens(shape: tuple[tuple[int, ...], int, int, int, int]) -> None:
    tensors = inputs(*shape)
    leaves = [x.requires_grad_() for i, x in enumerate(tensors) if i != 1]
    actual, expected = experts(*tensors), plain(*tensors)
    torch.testing.assert_close(actual, expected)
    dout = torch.randn_like(actual)
    for ours, theirs in zip(torch.autograd.grad(actual, leaves, dout), torch.autograd.grad(expected, leaves, dout)):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_devices_with_some_experts_or_columns_hold_parts_of_the_sum(
    shape: tuple[tuple[int, ...], int, int, int, int],
) -> None:
    x, ids, weights, gate, up, down = inputs(*shape)
    dout = torch.randn_like(x)
    first, half = gate.shape[0] // 3, gate.shape[1] // 2
    whole = [OP(x, ids, weights, gate, up, down), *BACKWARD(dout, x, ids, weights, gate, up, down)]
    for cuts, dim in (((slice(first), slice(first, None)), 0), ((slice(half), slice(half, None)), 1)):
        parts = []
        for cut in cuts:
            own = [gate[cut], up[cut], down[cut]] if dim == 0 else [gate[:, cut], up[:, cut], down[:, :, cut]]
            mine = ids - cut.indices(10**6)[0] if dim == 0 else ids
            parts.append([OP(x, mine, weights, *own), *BACKWARD(dout, x, mine, weights, *own)])
        for one, other, all_of_it in zip(*(part[:3] for part in parts), whole):
            torch.testing.assert_close(one + other, all_of_it)
        for i, along in ((3, dim), (4, dim), (5, 2 * dim)):
            torch.testing.assert_close(torch.cat([part[i] for part in parts], along), whole[i])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    exact = inputs(*SHAPES[0])
    rounded = [x if i == 1 else x.to(dtype) for i, x in enumerate(exact)]
    rounded[2] = exact[2].float()
    dout = torch.ones_like(exact[0])
    actual = [OP(*rounded), *BACKWARD(dout.to(dtype), *rounded)]
    expected = [OP(*exact), *BACKWARD(dout, *exact)]
    assert [x.dtype for x in actual] == [dtype, dtype, torch.float32, dtype, dtype, dtype]
    close = 0.06 if dtype == torch.bfloat16 else 1e-5
    for ours, theirs in zip(actual, expected):
        assert float((ours.double() - theirs).norm() / theirs.norm()) < close


def test_registration() -> None:
    """Schema, fake shapes and autograd agree with the kernels; the same inputs give the same bits."""
    tensors = inputs(*SHAPES[0])
    leaves = [x if i == 1 else x.requires_grad_() for i, x in enumerate(tensors)]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(OP.default, tuple(leaves), test_utils=checks)
    assert torch.equal(OP(*leaves), OP(*leaves))
    with torch.no_grad():
        torch.library.opcheck(BACKWARD.default, (torch.ones_like(tensors[0]), *tensors), test_utils=checks[:2])


def test_refuses_operands_that_do_not_fit() -> None:
    x, ids, weights, gate, up, down = inputs(*SHAPES[0])
    for wrong in ([x[..., :5], ids, weights, gate, up, down], [x, ids[:1], weights, gate, up, down],
                  [x, ids, weights, gate, up[:3], down], [x, ids, weights, gate, up, gate]):  # fmt: skip
        with pytest.raises(ValueError, match="do not match"):
            OP(*wrong)
