"""Slices, padding, shifts and joins of a sharded dim read neighbours by permute and send nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.parallelism import Mesh, Program, partition
from tpshard.parallelism.mesh import Axis
from tpshard.parallelism.resharding.halo import Halo, halo_of
from tpshard.parallelism.rules.rule import Window
from tpshard.parallelism.sharding import local_size

torch.set_num_threads(1)
FOUR = Mesh({"x": 4})
MESHES = [Mesh({"x": 2}), Mesh({"x": 3}), FOUR, Mesh({"x": 2, "y": 2}), Mesh({"x": 2, "y": 3})]
Fn = Callable[..., Any]


def same(
    fn: Fn, args: list[Tensor], mesh: Mesh, shardings: list[Any], out: list[Any] | None = None, latency: int = 0
) -> Program:  # fmt: skip
    """The program of `fn`, whose simulation equals `fn` itself."""
    program = partition(fn, args, mesh, shardings, out, latency=latency)
    expected = fn(*args)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for mine, theirs in zip(program.simulate(*args), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    return program


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("members", [2, 3, 4])
def test_every_window_lies_in_what_a_device_has_and_fetches(members: int) -> None:
    """For every size, offset, stride and span: each position that a device's part of the result reads, and that the
    operand has, is where the halo says."""
    axes = (Axis("x", 1, members),)
    rng = random.Random(members)
    for _ in range(400):
        operand, result = rng.randint(1, 20), rng.randint(1, 20)
        window = Window(0, 0, 1, 0, rng.randint(-9, 9), rng.randint(1, 3), rng.randint(1, 4))
        halo = halo_of(operand, result, axes, window)
        assert isinstance(halo, Halo)
        part, actual = local_size(operand, axes), local_size(result, axes)
        for r in range(members):
            beside = [None] * halo.padding[0] + list(range(r * part - halo.left, (r + 1) * part + halo.right))
            beside += [None] * halo.padding[1]
            mine = beside[halo.starts[r] : halo.starts[r] + halo.length]
            assert len(mine) == halo.length
            for o in range(r * actual, min((r + 1) * actual, result)):
                for k in range(window.span):
                    expected = o * window.stride + window.first + k
                    if 0 <= expected < operand:
                        assert mine[(o - r * actual) * window.stride + k] == expected
                    else:
                        assert halo.outside
        assert sum(width for hop, width in halo.hops() if hop > 0) == halo.left


def test_neighbours_are_read_not_gathered() -> None:
    x = rand(16, 64, 64)
    cases: list[tuple[Fn, int]] = [
        (lambda x: x[1:] - x[:-1], 1), (lambda x: F.pad(x, (0, 0, 0, 0, 1, -1), value=3.0), 1),
        (lambda x: torch.roll(x, (-1, 2), (0, 1)), 1),
        (lambda x: torch.roll(x, 64 * 64 + 5), 2),  # over all elements: a row and a bit
        (lambda x: torch.flip(x, [0]), 4), (lambda x: F.pad(x, (0, 0, 0, 0, -2, 2)), 2),
    ]  # fmt: skip
    for fn, rows in cases:
        program = same(fn, [x], FOUR, [("x",)], [("x",)])
        assert {c.kind for c in program.collectives} == {"permute"}
        assert sum(c.bytes for c in program.collectives) <= rows * 64 * 64 * 8


def test_windows_of_images_send_what_overlaps() -> None:
    """Columns of `F.unfold`, their products and gradients: rows of an image stay sharded through all of it."""
    x, w, y = rand(2, 3, 16, 12), rand(5, 27), rand(2, 27, 192)

    def gradients(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        loss = torch.einsum("ok,nkl->nol", w, F.unfold(x, 3, padding=1)).pow(2).sum()
        return torch.autograd.grad(loss, (x, w))

    row, columns = 2 * 3 * 12 * 8, (None, None, "x")
    program = same(gradients, [x, w], FOUR, [columns, ()], [columns, ()])
    assert (
        sorted((c.kind, c.bytes) for c in program.collectives) == [("all_reduce", 5 * 27 * 8)] + [("permute", row)] * 4
    )
    assert program.flop_efficiency == 1
    program = same(lambda y: F.fold(y, (16, 12), 3, padding=1), [y], FOUR, [columns], [columns])
    assert [(c.kind, c.bytes) for c in program.collectives] == [("permute", row)] * 2
    assert not same(lambda x: F.unfold(x, 4, stride=4), [x], FOUR, [columns], [columns]).collectives
    program = same(lambda x: x.unfold(2, 3, 1), [x], FOUR, [columns])
    assert {c.kind for c in program.collectives} == {"permute"}


def test_padding_with_one_row_of_the_tensor_sends_rows_alone() -> None:
    """A flip of one row is that row, and so is a join of one tensor: nothing needs it whole."""
    x = rand(2, 16, 12)
    for mode in ("reflect", "replicate"):
        program = same(lambda x, mode=mode: F.pad(x, (0, 0, 1, 1), mode=mode), [x[None]], FOUR, [(None, None, "x")])
        assert {c.kind for c in program.collectives} == {"permute"}


def test_a_diagonal_lies_where_the_rows_are() -> None:
    x, squares = rand(3, 8, 8), Mesh({"x": 2, "y": 2})
    assert not same(lambda x: x.diagonal(0, 1, 2), [x], FOUR, [(None, "x")]).collectives
    assert not same(lambda x: torch.diag_embed(x), [x], FOUR, [(None, "x")]).collectives
    program = same(lambda x: x.diagonal(0, 1, 2), [x], squares, [(None, "x", "y")])
    assert [(c.kind, c.axes, c.bytes) for c in program.collectives] == [("all_reduce", ("y",), 3 * 4 * 8)]


def test_the_gradient_of_a_cumulative_sum_sends_totals_alone() -> None:
    x = rand(3, 16)

    def gradient(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.cumsum(1).pow(2).sum(), x)[0]

    program = same(gradient, [x], FOUR, [(None, "x")], [(None, "x")])
    assert [(c.kind, c.bytes) for c in program.collectives] == [("all_gather", 4 * 3 * 8)] * 2


def test_the_device_that_has_a_position_gives_it_to_all() -> None:
    x = rand(64, 16, 8)
    for fn in (lambda x: x[:, -1], lambda x: x[:, 3:5]):
        program = same(fn, [x], FOUR, [(None, "x")], [(None, None)])
        assert sum(c.bytes for c in program.collectives) <= 2 * 64 * 2 * 8 * 8
    program = same(lambda x: (torch.tril(x, 1), torch.triu(x, -2)), [rand(10, 9)], FOUR, [("x",)])
    assert not program.collectives


def some_pieces(rng: random.Random) -> tuple[Fn, list[Tensor]]:
    n, m = rng.choice([4, 5, 7, 8, 9, 12, 13, 16]), rng.choice([2, 3, 4])
    a = rng.randint(0, n - 1)
    b, step, shift = rng.randint(a + 1, n), rng.randint(2, 3), rng.randint(-n, n)
    before, after, value = rng.randint(-1, 5), rng.randint(-1, 5), rng.choice([0.0, 1.5])
    x, y, z = rand(n, m), rand(rng.randint(1, 9), m), rand(b - a, m)
    ways: list[tuple[Fn, list[Tensor]]] = [
        (lambda x: x[a:b], [x]), (lambda x: x[a:b:step], [x]), (lambda x: x[a], [x]),
        (lambda x: F.pad(x, (0, 0, before, after), value=value), [x]), (lambda x: torch.roll(x, shift, 0), [x]),
        (lambda x, y: torch.cat([x, y]), [x, y]), (lambda x, y: torch.cat([y, x[: a + 1], y]), [x, y]),
        (lambda x: torch.flip(x, [0]), [x]), (lambda x: torch.flip(x, [0, 1]), [x]),
        (lambda x: tuple(torch.chunk(x, 3)), [x]), (lambda x: (torch.tril(x, a - 2), torch.triu(x, 1 - a)), [x]),
        (lambda x, z: torch.slice_scatter(x, z, 0, a, b), [x, z]),
        (lambda x: torch.cat([x[:1] * 2, torch.relu(x[:-1])]), [x]), (lambda x: (x[1:] - x[:-1]).sum(0), [x]),
    ]  # fmt: skip
    return rng.choice(ways)


@pytest.mark.parametrize("seed", range(12))
def test_random_pieces_are_right_on_any_mesh(seed: int) -> None:
    """Also where a latency would make gathering cheaper: neighbours are read wherever they can be."""
    rng = random.Random(seed)
    for _ in range(8):
        (piece, args), mesh = some_pieces(rng), rng.choice(MESHES)
        tail = rng.choice([lambda o: o, lambda o: torch.exp(o) - 3, lambda o: (o * 2 + 1).sum(0)])

        def fn(*args: Tensor, piece: Fn = piece, tail: Fn = tail) -> tuple[Tensor, ...]:
            actual = piece(*args)
            return tuple(map(tail, actual if isinstance(actual, tuple) else (actual,)))

        ways = [("x", None), (tuple(mesh.axes), None), (None, "x"), (*mesh.axes, None)[:2], None]
        same(fn, args, mesh, [rng.choice(ways) for _ in args], latency=0)
