"""Hand-written collectives mean what they document, and the program sends exactly them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from tpshard.parallelism import (
    Mesh,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    manual,
    mesh_split,
    partition,
    permute,
    pmax,
    propagation_barrier,
    psum,
    reduce_scatter,
    sharding_group,
)

MESH = Mesh({"x": 4, "y": 2})
X = torch.arange(8.0 * 12).view(8, 12).sin().double()
PARTS = X.view(4, 2, 12)


def by(body: Callable[..., Any], ins: Sequence[Any], outs: Sequence[Any], axes: Any = "x") -> Callable[..., Any]:
    return manual(MESH, axes, ins, outs)(body)


ROWS, COLUMNS = ("x",), (None, "x")
SUM = PARTS.sum(0)
COLLECTIVES: list[tuple[Callable[[Tensor], Tensor], Any, Any, Tensor, list[str]]] = [
    (lambda x: psum(x, "x"), ROWS, None, SUM, ["all_reduce"]),
    (lambda x: pmax(x, "x"), ROWS, None, PARTS.amax(0), ["all_reduce"]),
    (lambda x: psum(x, "x"), None, None, 4 * X, []),
    (lambda x: all_gather(x, "x"), ROWS, None, X, ["all_gather"]),
    (lambda x: all_gather(x, "x", 1), ROWS, None, torch.cat(list(PARTS), 1), ["all_gather"]),
    (lambda x: reduce_scatter(x, "x", 1), ROWS, COLUMNS, SUM, ["reduce_scatter"]),
    (lambda x: all_to_all(x, "x", 1, 0), ROWS, COLUMNS, X, ["all_to_all"]),
    (lambda x: all_to_all(x, "x", 0, 1), COLUMNS, ROWS, X, ["all_to_all"]),
    (lambda x: permute(x, "x", [(i, (i + 1) % 4) for i in range(4)]), ROWS, ROWS, X.roll(2, 0), ["permute"]),
    (lambda x: permute(x, "x", [(0, 1), (2, 3)]), ROWS, ROWS,
     torch.stack([0 * PARTS[0], PARTS[0], 0 * PARTS[0], PARTS[2]]).view(8, 12), ["permute"]),
    (lambda x: permute(x, "x", [(3, 0), (1, 2)]), ROWS, ROWS,
     torch.stack([PARTS[3], 0 * PARTS[0], PARTS[1], 0 * PARTS[0]]).view(8, 12), ["permute"]),
    (lambda x: x * axis_index("x") + axis_size("x"), ROWS, ROWS, X * torch.arange(8).div(2).floor()[:, None] + 4, []),
]  # fmt: skip


@pytest.mark.parametrize(("body", "lies", "result_spec", "expected", "kinds"), COLLECTIVES)
def test_a_collective_is_what_it_says(
    body: Callable[[Tensor], Tensor], lies: Any, result_spec: Any, expected: Tensor, kinds: list[str]
) -> None:
    fn = by(body, [lies], [result_spec])
    torch.testing.assert_close(fn(X), expected, rtol=0, atol=1e-14)
    program = partition(fn, [X], MESH, [lies or ()])
    torch.testing.assert_close(program.simulate(X)[0], expected, rtol=0, atol=1e-14)
    assert [c.kind for c in program.collectives] == kinds
    assert all(c.axes == ("x",) for c in program.collectives)


def test_other_axes_are_propagated_inside() -> None:
    """Rows by hand over x, columns of the weight by propagation over y; the product's gradient is summed over both."""
    w = torch.randn(12, 6, dtype=torch.float64)

    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        x, w = (t.detach().requires_grad_() for t in (x, w))
        hidden = by(lambda x, w: torch.relu(x @ w) / psum(x.square().sum(), "x"), [ROWS, None], [ROWS])(x, w)
        loss = (hidden * hidden).sum()
        return [hidden.detach(), *torch.autograd.grad(loss, (x, w))]

    program = partition(step, [X, w], MESH, [("x",), (None, "y")])
    y = X.detach().requires_grad_()
    v = w.detach().requires_grad_()
    hidden = torch.relu(y @ v) / y.square().sum()
    expected = [hidden, *torch.autograd.grad((hidden * hidden).sum(), (y, v))]
    for one, other in zip(program.simulate(X, w), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert program.out_shardings == [("x", "y"), ("x", None), (None, "y")]
    products = [n for n in program.graph.nodes if "mm" in str(n.target)]
    assert products and all(n.meta["tpshard"].flops * 8 == n.meta["tpshard"].global_flops for n in products)


def test_a_region_over_two_axes() -> None:
    def body(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        part = all_gather(x, "y", 1) + bias
        return psum(part, ("y", "x")), reduce_scatter(part.T @ part, "y", 0)

    bias = torch.randn(12, dtype=torch.float64)
    fn = by(body, [("x", "y"), None], [None, ("y", None)], ("x", "y"))
    with pytest.raises(ValueError, match=r"result 1 .* differs along `x`, which out_shardings"):
        fn(X, bias)
    fn = by(lambda x, b: (body(x, b)[0], psum(body(x, b)[1], "x")), [("x", "y"), None], [None, ("y",)], ("x", "y"))
    whole = (X + bias).view(4, 2, 12)
    expected = [2 * whole.sum(0), 2 * (X + bias).T @ (X + bias)]
    program = partition(fn, [X, bias], MESH, [("x", "y"), None])
    for one, two, other in zip(fn(X, bias), program.simulate(X, bias), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(two, other, rtol=1e-12, atol=1e-12)


def test_gradients_go_back_through_collectives() -> None:
    """Ring attention by hand: the gradient of a shift is the shift back."""

    def ring(x: Tensor) -> Tensor:
        total, sent = x * x, x
        for _ in range(3):
            sent = permute(sent, "x", [(i, (i + 1) % 4) for i in range(4)])
            total = total + x * sent
        return psum((total * total).sum(), "x")

    def grad(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(by(ring, [ROWS], [None])(x), x)[0]

    program = partition(grad, [X], MESH, [ROWS])
    x = X.detach().requires_grad_()
    each = x.view(4, 2, 12)
    expected = torch.autograd.grad((each * each.sum(0)).square().sum(), x)[0]
    torch.testing.assert_close(program.simulate(X)[0], expected, rtol=1e-12, atol=1e-12)
    assert {c.kind for c in program.collectives} == {"permute"}


def nest(x: Tensor) -> Tensor:
    return by(lambda x: x, [ROWS], [ROWS])(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: by(lambda x: x, [ROWS], [None])(X), "differs along `x`, which out_shardings"),
        (lambda: by(lambda x: x, [("z",)], [None]), "names `z`, which is no axis of the manual region"),
        (lambda: by(lambda x: x, [("x", "x")], [None]), "names an axis twice"),
        (lambda: manual(MESH, "z", [None], [None]), "has no axis `z`"),
        (lambda: by(lambda x: x, [ROWS], [ROWS])(X[:6]), "dim 0 of .6, 12. does not divide over x"),
        (lambda: by(lambda x: x, [ROWS, None], [ROWS])(X), "has 2 entries for 1 tensor arguments"),
        (lambda: by(lambda x: (x, x), [ROWS], [ROWS])(X), "has 1 entries for 2 results"),
        (lambda: by(lambda x: psum(x, "y"), [ROWS], [ROWS])(X), "over `y` is called outside of a manual region"),
        (lambda: psum(X, "x"), "there is none"),
        (lambda: by(lambda x: all_to_all(x, "x", 0, 1), [ROWS], [ROWS])(X), "does not divide over `x`"),
        (lambda: by(lambda x: permute(x, "x", [(0, 1), (2, 1)]), [ROWS], [ROWS])(X), "to each, at most once"),
        (lambda: by(lambda x: mesh_split(x, MESH, [-1, 1]), [ROWS], [ROWS])(X), "annotates whole tensors"),
        (lambda: by(nest, [ROWS], [ROWS], ("x",))(X), "is called inside of another"),
    ],
)  # fmt: skip
def test_what_is_not_legal_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("allowed", "before", "behind"), [
    ("forward", False, True), ("backward", True, False), ("none", False, False), ("both", True, True),
])  # fmt: skip
def test_a_barrier_lets_shardings_pass_as_it_says(allowed: str, before: bool, behind: bool) -> None:
    def through(x: Tensor, y: Tensor) -> Tensor:
        return propagation_barrier(x.sin(), allowed) + y

    for rows, other in ((0, behind), (1, before)):  # what is sharded by rows, and whether the other input becomes so
        shardings: list[Any] = [None, None]
        shardings[rows] = ROWS
        program = partition(through, [X, X], MESH, shardings)
        assert (program.in_shardings[1 - rows] != (None, None)) is other
        torch.testing.assert_close(program.simulate(X, X)[0], through(X, X))

    def gradient(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(propagation_barrier(x, allowed).sin().sum(), x)[0]

    torch.testing.assert_close(partition(gradient, [X], MESH, [("x",)]).simulate(X)[0], X.cos())
    with pytest.raises(ValueError, match="a propagation barrier allows none, forward, backward, both, not 'up'"):
        propagation_barrier(X, "up")


def test_a_group_is_sharded_alike() -> None:
    def apart(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = sharding_group(x.detach().requires_grad_(), y)
        return torch.autograd.grad((x * x).sum(), x)[0], y * 2

    y = X + 1
    program = partition(apart, [X, y], MESH, [("x", "y"), None])
    assert program.in_shardings == [("x", "y")] * 2 and program.collectives == []
    assert torch.equal(program.simulate(X, y)[1], 2 * y)
    with pytest.raises(ValueError, match="tensors of one sharding group have one shape"):
        sharding_group(X, X[0])
