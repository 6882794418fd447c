"""Dims that their axes do not divide are padded, and the padding never changes a result."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.parallelism import Mesh, Program, mesh_split, partition
from tpshard.parallelism.mesh import Axis
from tpshard.parallelism.propagation.storage import storage_layout
from tpshard.parallelism.resharding.reshard import redistribution
from tpshard.parallelism.sharding import Layout, refines

torch.set_num_threads(1)
THREE, FOUR = Mesh({"x": 3}), Mesh({"x": 4})
SQUARE = Mesh({"x": 2, "y": 2})


def same(fn: Callable[..., Any], args: list[Tensor], mesh: Mesh, shardings: list[Any], out: Any = None) -> Program:
    """The program of `fn`, whose simulation equals `fn` itself."""
    program = partition(fn, args, mesh, shardings, out)
    expected = fn(*args)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for mine, theirs in zip(program.simulate(*args), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    return program


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_rows_that_three_devices_do_not_divide_are_multiplied_without_a_gather() -> None:
    program = same(torch.matmul, [rand(1000, 64), rand(64, 32)], THREE, [("x",), None])
    assert not program.collectives and program.flop_efficiency >= 0.99
    assert program.sharding_of("return[0]") == ("x", None)


def test_padding_of_a_contraction_counts_nothing_even_where_it_is_not_finite() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.log(x).mT @ w  # log(0) is the padding's

    same(fn, [rand(10, 5).abs() + 1, rand(10, 7)], THREE, [("x",), ("x",)])
    same(fn, [rand(10, 5).abs() + 1, rand(10, 7)], FOUR, [("x",), None])


@pytest.mark.parametrize("mesh", [THREE, FOUR], ids=str)
def test_reductions_leave_padding_out(mesh: Mesh) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.exp(x) - 20  # the padding, 0, becomes -19: neither neutral for a sum nor for a maximum
        return y.sum(0), y.mean(0), y.amax(0), (-y).amin(), torch.log_softmax(y, 0), y.var(0), y.prod(0), y.argmax(0)

    same(fn, [rand(10, 4) - 5], mesh, [("x",)])
    numbers = torch.arange(10)
    same(lambda n: (n.amax(), (n - 50).amax(), (n + 1).amin(), (n + 1).sum()), [numbers], mesh, [("x",)])


def test_a_batch_of_four_on_three_devices_flows_through_a_loss_and_its_gradient() -> None:
    """[4, 8] and [32] are cut between the same elements: no reshard where a view joins batch and sequence."""

    def step(x: Tensor, w: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        w = w.detach().requires_grad_()
        logits = x @ w
        loss = F.cross_entropy(logits.view(-1, 50), targets.view(-1))
        return loss, torch.autograd.grad(loss, w)[0]

    args = [rand(4, 8, 16), rand(16, 50), torch.arange(32).view(4, 8)]
    program = same(step, args, THREE, [("x",), None, ("x",)])
    assert {c.kind for c in program.collectives} == {"all_reduce"}
    assert sum(c.bytes for c in program.collectives) == 16 * 50 * 8 + 2 * 8
    assert program.flop_efficiency == pytest.approx(4 / 6, abs=1e-3)
    same(step, args, FOUR, [None, (None, "x"), None])  # a vocabulary of 50
    same(step, args, SQUARE, [("x",), (None, "y"), ("x",)])


def test_six_heads_on_four_devices() -> None:
    def attention(x: Tensor, w: Tensor) -> Tensor:
        q = torch.einsum("bsd,dhk->bshk", x, w)
        return torch.softmax(torch.einsum("bshd,bthd->bhst", q, q), -1)

    program = same(attention, [rand(4, 8, 16), rand(16, 6, 5)], FOUR, [None, (None, "x")])
    assert not program.collectives and program.flop_efficiency == 0.75

    def split(x: Tensor, w: Tensor) -> Tensor:
        q = mesh_split((x @ w).view(4, 8, 6, 5), FOUR, [-1, -1, 0, -1])
        return torch.softmax(torch.einsum("bshd,bthd->bhst", q, q), -1)

    same(split, [rand(4, 8, 16), rand(16, 30)], FOUR, [None, None])
    same(split, [rand(4, 8, 16), rand(16, 30)], FOUR, [None, (None, "x")])


def test_indices_in_the_padding_are_never_looked_up() -> None:
    table, rows = rand(11, 4), torch.arange(7)
    for shardings in ([("x",), None], [None, ("x",)], [None, (None, "x")]):
        same(lambda t, w: F.embedding(t + 3, w).exp().sum(0), [rows, table], FOUR, shardings)
        same(lambda t, w: w[10 - t].exp().sum(0), [rows, table], FOUR, shardings)

    def update(w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        rows = w.gather(0, (t[:, None] + 3).expand(7, 4))
        return rows.sum(0), torch.zeros_like(w).scatter_add(0, (t[:, None] + 3).expand(7, 4), rows)

    for shardings in ([("x",), None], [None, ("x",)], [(None, "x"), None]):
        same(update, [table, rows], FOUR, shardings)


def test_divisors_in_the_padding_are_not_zero() -> None:
    same(lambda a, b: (a // b, a % b, (a // b).sum()), [torch.arange(7) + 9, torch.arange(7) + 1], FOUR, [("x",)] * 2)


@pytest.mark.parametrize("mesh", [THREE, FOUR], ids=str)
def test_pivots_in_the_padding_are_rows(mesh: Mesh) -> None:
    """torch checks that they count from 1, where the padding would hold 0."""
    lu, pivots = torch.linalg.lu_factor(rand(2, 3, 3))
    same(torch.linalg.lu_solve, [lu, pivots, rand(2, 3, 4)], mesh, [("x",)] * 3, [("x",)])
    same(torch.lu_unpack, [lu, pivots], mesh, [("x",)] * 2, [("x",)] * 3)


@pytest.mark.parametrize(
    ("shape", "dims"), [((7,), ("x",)), ((7, 6), ("x", "y")), ((7, 5), ("x", "y")), ((7, 1), ("x", "y"))]
)
def test_a_dim_that_an_axis_cuts_unevenly_is_not_stored_over_another(shape: tuple[int, ...], dims: tuple[str]) -> None:
    x, y = SQUARE.axis("x"), SQUARE.axis("y")
    used = Layout(((x,), *((),) * (len(shape) - 1)))
    assert storage_layout(shape, used, (y,)) == Layout(tuple((SQUARE.axis(name),) for name in dims))


@pytest.mark.parametrize("places", list(itertools.permutations(("x", "y", None), 2)), ids=str)
def test_two_axes_on_one_uneven_dim(places: tuple[str | None, ...]) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.exp(x @ w).sum(0)

    same(fn, [rand(7, 5), rand(5, 3)], SQUARE, [(("x", "y"), None), places], [("x",)])
    same(fn, [rand(7, 5), rand(5, 3)], SQUARE, [(("y", "x"), None), places], [("y",)])


def test_parts_of_an_axis_cut_an_uneven_dim_elsewhere_than_the_axis() -> None:
    whole, half = (Axis("x", 1, 4),), (Axis("x", 1, 2),)
    assert refines(12, whole, half) and not refines(10, whole, half) and refines(10, whole, ())
    assert refines(10, (*half, Axis("y", 1, 2)), half)
    steps = redistribution((10,), Layout((whole,)), Layout((half,)), 4)
    assert [s.kind for s in steps] == ["gather", "slice"] and steps[0].after.dims == ((),)


def test_elements_are_picked_of_rows_that_are_fewer_than_the_devices() -> None:
    """Four rows of four, flattened, on sixteen devices: the last twelve devices have none."""
    mesh, x, picked = Mesh({"x": 4, "y": 4}), torch.randn(4, 4), torch.tensor([[1, 2], [5, 15]])
    program = partition(lambda x: x.reshape(-1)[picked], [x], mesh, [(("x", "y"),)])
    assert torch.equal(program.simulate(x)[0], x.reshape(-1)[picked])


def test_rows_that_are_cut_together_are_not_viewed_as_cut_one_by_one() -> None:
    """Six rows of four on four devices are 2, 2, 2 and 0; as two rows of twelve they would be 2, 1, 2 and 1."""
    x = torch.randn(6, 4, dtype=torch.float64)

    def halves(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x.reshape(24), (0, 0)).reshape(2, 12).sum(0)

    program = partition(halves, [x], Mesh({"x": 4}), [("x",)])
    torch.testing.assert_close(program.simulate(x)[0], halves(x))
