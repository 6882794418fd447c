"""Reads and writes by index equal one device's, and index dims that count along need no exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.parallelism import Mesh, partition

MESH = Mesh({"a": 2, "b": 3})


def read_rows(x: Tensor, i: Tensor) -> Tensor:
    return x[torch.arange(6)[:, None], i]


def read_transpose(x: Tensor, i: Tensor) -> Tensor:
    return x.transpose(0, 1)[i.T, torch.arange(6)]


def read_stack(x: Tensor, i: Tensor) -> Tensor:
    both = torch.cat([torch.arange(6)[None, :, None].expand(1, 6, 4), i[None]])
    return x[both[0], both[1]]


def write_rows(x: Tensor, i: Tensor) -> Tensor:
    return x.index_put((torch.arange(6)[:, None], i), torch.ones(6, 4, 5))


def add_rows(x: Tensor, i: Tensor) -> Tensor:
    return x.index_put((torch.arange(6)[:, None], i), x[:, :4], accumulate=True)


def read_two(x: Tensor, i: Tensor) -> Tensor:
    return x[i.remainder(6), i]


def read_last(x: Tensor, i: Tensor) -> Tensor:
    return x[:, i - 7, i.remainder(5)]


def write_two(x: Tensor, i: Tensor) -> Tensor:
    return x.index_put((i.remainder(6), i), torch.full((5,), 2.0))


def add_one(x: Tensor, i: Tensor) -> Tensor:
    return torch.ops.aten.index_put(x, [None, i], torch.ones(6, 6, 4, 5), True)


ALL: list[Callable[..., Any]] = [
    read_rows, read_transpose, read_stack, write_rows, add_rows, read_two, read_last, write_two, add_one,
]  # fmt: skip
PLACES: list[list[Any]] = [
    [("a",), ("a",)], [("b",), None], [(None, "a"), None], [("b", "a"), ("b",)], [(None, "b", "a"), (None, "a")],
    [(("a", "b"),), ("b", "a")], [(None, ("b", "a")), (None, "b")],
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("fn", ALL, ids=lambda fn: fn.__name__)
def test_devices_read_and_write_what_one_does(fn: Callable[..., Any], place: list[Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, i = torch.randn(6, 7, 5, generator=generator), torch.randint(0, 7, (6, 4), generator=generator)
    if fn is write_two:  # several writes to one place are in no order
        i = torch.arange(24).reshape(6, 4).remainder(7)
    program = partition(fn, [x, i], MESH, place)
    torch.testing.assert_close(program.simulate(x, i)[0], fn(x, i))


@pytest.mark.parametrize("fn", ALL[:5], ids=lambda fn: fn.__name__)
def test_a_dim_that_is_counted_along_shards_alike(fn: Callable[..., Any]) -> None:
    args = [torch.empty(6, 7, 5), torch.zeros(6, 4, dtype=torch.int64)]
    for axis in "ab":
        program = partition(fn, args, MESH, [(axis,), (axis,)])
        assert not program.collectives and axis in program.out_shardings[0]
    assert partition(fn, args, MESH, [("b",), None]).in_shardings[1][0] == "b"


@pytest.mark.parametrize("how", ["sum", "mean", "prod", "amax"])
def test_rows_reduced_into_few_send_the_few(how: str) -> None:
    x, index, rows = torch.randn(4, 8), torch.randint(0, 3, (96, 8)), torch.randn(96, 8)
    for own in (True, False):
        program = partition(
            lambda x, i, s: x.scatter_reduce(0, i, s, how, include_self=own), [x, index, rows], Mesh({"a": 4}),  # noqa: B023
            [None, ("a",), ("a",)],
        )  # fmt: skip
        expected = x.scatter_reduce(0, index, rows, how, include_self=own)
        torch.testing.assert_close(program.simulate(x, index, rows)[0], expected)
        assert sum(c.bytes for c in program.collectives) <= 4 * x.nbytes + x.numel()


@pytest.mark.parametrize("how", ["sum", "mean", "prod", "amin"])
def test_rows_reduced_into_a_sharded_tensor_send_nothing(how: str) -> None:
    args = [torch.randn(96, 8), torch.randint(0, 96, (5, 8)), torch.randn(5, 8)]
    fn = lambda x, i, s: x.scatter_reduce(0, i, s, how)  # noqa: E731
    program = partition(fn, args, Mesh({"a": 4}), [("a",), None, None])
    torch.testing.assert_close(program.simulate(*args)[0], fn(*args))
    assert not program.collectives


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_length_are_looked_up_where_they_are(mode: str) -> None:
    table, rows = torch.randn(12, 4, dtype=torch.float64), torch.randint(12, (10, 3))

    def step(rows: Tensor, table: Tensor) -> Any:
        table = table.detach().requires_grad_()
        bags = F.embedding_bag(rows, table, mode=mode, padding_idx=2)
        return bags.detach(), torch.autograd.grad((bags * bags.detach().sin()).sum(), table)[0]

    for mesh in (Mesh({"x": 2}), Mesh({"x": 4})):  # even and uneven
        program = partition(step, [rows, table], mesh, [("x",), None], [("x",), None])
        for result, expected in zip(program.simulate(rows, table), step(rows, table)):
            torch.testing.assert_close(result, expected)
        assert [c.kind for c in program.collectives] == ["all_reduce"]  # of the table's gradient


def test_products_with_two_inputs_keep_their_rows() -> None:
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in ((8, 3), (8, 5), (4, 3, 5))]
    program = partition(F.bilinear, inputs, Mesh({"x": 4}), [("x",), ("x",), None])
    torch.testing.assert_close(program.simulate(*inputs)[0], F.bilinear(*inputs))
    assert not program.collectives
