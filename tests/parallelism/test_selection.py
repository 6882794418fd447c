"""argmax, top-k, products and scans of a sharded dim combine each device's result with a small exchange."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from tpshard.parallelism import Mesh, partition

torch.set_num_threads(1)
EIGHT = Mesh({"x": 8})
MESHES = [Mesh({"x": 2}), Mesh({"x": 3}), Mesh({"x": 4}), Mesh({"x": 2, "y": 2})]


def ways(k: int, keep: bool) -> list[Callable[[Tensor], Any]]:
    return [
        lambda x: x.argmax(1, keep), lambda x: x.argmin(1, keep), lambda x: tuple(x.max(1, keep)),
        lambda x: tuple(x.min(-1, keep)), lambda x: tuple(x.topk(k)), lambda x: tuple(x.topk(k, 0, largest=False)),
        lambda x: (x * 2 + 1).cumsum(1), lambda x: x.cumsum(0), lambda x: tuple(x.cummax(1)),
        lambda x: tuple(x.flip(1).cummin(0)), lambda x: x.double().logcumsumexp(1), lambda x: (x > 3).any(1, keep),
        lambda x: (x.double() / 20).cumprod(1), lambda x: (x > 3).cumsum(1),
        lambda x: (x > 3).flip(0).cumsum(0).flip(0), lambda x: (x.double() / 20).flip(1).cumprod(1).flip(1),
        lambda x: (x.double() / 20).prod(1, keep), lambda x: (x > -9).all(),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_parts_agree_on_what_the_whole_has(seed: int) -> None:
    rng = random.Random(seed)
    for fn in ways(rng.randint(1, 4), rng.random() < 0.5):
        rows, columns, mesh = rng.choice([4, 7, 8, 12]), rng.choice([5, 8, 16]), rng.choice(MESHES)
        numbers = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(seed)).view(rows, columns)
        x = numbers.double() - 20 if rng.random() < 0.8 else numbers
        axes = tuple(mesh.axes)
        way = rng.choice([(None, "x"), (None, axes), (None, axes[::-1]), ("x",)])
        program = partition(fn, [x], mesh, [way], latency=0)
        expected = fn(x)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for mine, theirs in zip(program.simulate(x), expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_the_first_of_equal_ones_is_taken_wherever_it_lies() -> None:
    x = torch.zeros(3, 16)
    for fn in (lambda x: x.argmax(1), lambda x: x.max(1).indices, lambda x: x.argmin(1)):
        program = partition(fn, [x], EIGHT, [(None, "x")])
        assert torch.equal(program.simulate(x)[0], torch.zeros(3, dtype=torch.int64))


def test_what_is_exchanged_is_small() -> None:
    logits = torch.randn(64, 4096)
    scans = [lambda x: x.cumprod(1), lambda x: x.logcumsumexp(1), lambda x: tuple(x.cummax(1))]
    every = [(lambda x: x.argmax(1), 1), (lambda x: tuple(x.topk(4)), 4), (lambda x: x.cumsum(1), 1)]
    for fn, elements in [*every, *((scan, 1) for scan in scans)]:
        program = partition(fn, [logits], EIGHT, [(None, "x")])
        assert {c.kind for c in program.collectives} == {"all_gather"}
        assert sum(c.bytes for c in program.collectives) <= 8 * 64 * elements * (4 + 8)


@pytest.mark.parametrize("keepdim", [False, True])
def test_the_place_of_the_largest_of_all_is_exchanged_and_not_the_tensor(keepdim: bool) -> None:
    x = torch.randint(0, 9, (16, 32))
    program = partition(lambda x: x.argmax(keepdim=keepdim), [x], Mesh({"x": 4}), [("x",)])
    assert torch.equal(program.simulate(x)[0], x.argmax(keepdim=keepdim))
    assert sum(comm.bytes for comm in program.collectives) < 100
