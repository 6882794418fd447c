"""Writes through views give eager mode's results, and none remain in the captured graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.parallelism import Mesh, partition
from tpshard.parallelism.tracing.capture import capture
from tpshard.parallelism.tracing.functional import writes

MESHES = [Mesh({"x": 1}), Mesh({"x": 2}), Mesh({"x": 3}), Mesh({"x": 2, "y": 2})]


def column(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = 1.0
    return y


def columns(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 2:4] = x[:, :2]
    return y


def row(x: Tensor) -> Tensor:
    y = x * 2
    y[0].zero_()
    return y


def flat(x: Tensor) -> Tensor:
    y = x * 2
    y.view(-1).add_(1)
    return y


def view_of_view(x: Tensor) -> Tensor:
    y = x * 2
    y.t()[1:3].mul_(3).select(1, 0).neg_()
    return y


def read_afterwards(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.clone()
    part = y[:, 1:]
    y.tanh_()
    return part + 0, part.sum()


def strided_view(x: Tensor) -> Tensor:
    y = x.clone()
    y.as_strided((3, 2), (7, 2), 1).mul_(5)
    return y + x.as_strided((4, 6), (1, 4))


def strided_view_of_a_part(x: Tensor) -> tuple[Tensor, ...]:
    y = x.clone()
    part = y.view(-1)[4:20].view(4, 4)
    part.mul_(5)
    return (
        y + 0,
        part.as_strided((3, 2), (4, 2), 5),
        y[1:3].as_strided((2, 4), (6, 1)),
        y[1:3].t().as_strided((2,), (3,)),
    )


def circular(x: Tensor) -> Tensor:
    return F.pad(x[None], (2, 1), mode="circular")


def in_a_loop(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for i in range(1, x.shape[0]):
        out[i] = out[i - 1] * 0.5 + x[i]
    return out


def same_twice(x: Tensor) -> Tensor:
    y = torch.empty_like(x).fill_(2)
    z = y.detach()
    z.add_(1)
    return y * x


def unsqueeze(x: Tensor) -> Tensor:
    return (x * 1).unsqueeze_(0).transpose_(1, 2)


def of_strides(x: Tensor) -> Tensor:
    y = x.requires_grad_()
    (grad,) = torch.autograd.grad(y.as_strided((2, 5), (3, 2), 2).tanh().sum() + torch.fft.rfft(y).abs().sum(), y)
    return grad


def write_with_gradient(x: Tensor) -> Tensor:
    y = x.requires_grad_()
    z = (y * 2).clone()
    z[1:, ::2] *= y[1:, ::2]
    (grad,) = torch.autograd.grad(z.tanh().sum(), y)
    return grad


FUNCTIONS: list[Callable[[Tensor], object]] = [
    column, columns, row, flat, view_of_view, read_afterwards, strided_view, strided_view_of_a_part, circular,
    in_a_loop, same_twice, unsqueeze, of_strides, write_with_gradient,
]  # fmt: skip


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_a_write_is_seen_through_every_view(fn: Callable[[Tensor], object]) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    actual = fn(x.clone())
    expected = actual if isinstance(actual, tuple) else (actual,)
    for mesh in MESHES:
        for dims in ((None, None), ("x", None), (None, "x"), ("x", "y")):
            sharded = tuple(d if d in mesh.axes else None for d in dims)
            got = partition(fn, [x.clone()], mesh, [sharded]).simulate(x)
            torch.testing.assert_close(tuple(got), expected)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_no_op_of_a_captured_graph_writes(fn: Callable[[Tensor], object]) -> None:
    assert not any(writes(op) for op in capture(fn, [torch.empty(4, 6)]).ops)


def test_a_write_into_what_is_given_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"modifies its argument `scores`.*clone"):
        capture(lambda x: x.mul_(2).sum(), [torch.empty(4)], ["scores"])
    outside = torch.zeros(4)
    with pytest.raises(ValueError, match="in place"):
        capture(lambda x: outside.add_(x), [torch.empty(4)])


def test_a_strided_view_that_leaves_its_tensor_is_refused() -> None:
    for outside in (lambda x: x[2:].as_strided((2,), (1,), 0), lambda x: x[:2].as_strided((2,), (3,))):
        with pytest.raises(ValueError, match="elements outside of the view"):
            capture(outside, [torch.empty(5)])


def test_a_strided_view_is_refused_where_an_argument_is_a_view_itself() -> None:
    """A graph's arguments have no strides, on which the view's elements depend in eager mode."""
    base = torch.randn(24)
    for x in (base[4:], base[::2], base.view(4, 6).t()):
        with pytest.raises(ValueError, match="`x` is a view"):
            capture(lambda x: x.clone().as_strided((2, 2), (3, 1), 1), [x], ["x"])
    assert capture(lambda x: x.as_strided((2, 2), (3, 1), 1), [base[:12]]).outputs


def test_arguments_that_require_gradients_are_simulated() -> None:
    """Writes into complex results, of which torch has no gradient; what is simulated needs none."""
    x = torch.randn(4, 8, requires_grad=True)

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(torch.view_as_real(torch.fft.rfft(x)).pow(2).sum(), x)[0]

    (result,) = partition(gradient, [x], Mesh({"x": 2}), [("x",)]).simulate(x)
    torch.testing.assert_close(result, gradient(x))
    assert not result.requires_grad
