"""A split, a slice or a concatenation of a sharded dim moves each run of elements from the device that has it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.parallelism import Mesh, Program, partition
from tpshard.parallelism.mesh import Axes, Axis, size_of
from tpshard.parallelism.pricing.cost import wire_bytes
from tpshard.parallelism.resharding.runs import Read, runs_of
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Compiled, Executor
from tpshard.parallelism.sharding import local_size, spans

torch.set_num_threads(1)
MESHES = [Mesh({"x": 2}), Mesh({"x": 3}), Mesh({"x": 4}), Mesh({"x": 2, "y": 2}), Mesh({"x": 3, "y": 2})]
Fn = Callable[..., Any]


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def same(fn: Fn, args: list[Tensor], mesh: Mesh, shardings: list[Any], out: list[Any] | None = None) -> Program:
    """The program of `fn`, whose simulation equals `fn` itself."""
    program = partition(fn, args, mesh, shardings, out)
    for mine, theirs in zip(program.simulate(*args), fn(*args), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    return program


def sent(program: Program) -> int:
    return sum(wire_bytes(c.kind, c.bytes, c.size) for c in program.collectives)


def some_reads(rng: random.Random) -> list[Read]:
    """A split into parts of random sizes, some unread, or such a concatenation."""
    sizes = [rng.randint(1, 20) for _ in range(rng.randint(1, 4))]
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    if rng.random() < 0.5:
        return [Read(i, n, 0, sum(sizes), -first) for i, (n, first) in enumerate(zip(sizes, firsts))]
    parts = [n * (rng.random() < 0.8) for n in sizes]
    return [Read(0, sum(sizes), i, n, first) for i, (n, first) in enumerate(zip(parts, firsts))]


@pytest.mark.parametrize("axes", [(2,), (3,), (8,), (2, 3), (3, 2)])
def test_every_element_arrives_at_its_place(axes: tuple[int, ...]) -> None:
    """For shards of any size, with padding between them too: carrying out the plan gives every device its shards."""
    over: Axes = tuple(Axis(f"a{i}", 1, n) for i, n in enumerate(axes))
    rng = random.Random(0)
    for _ in range(200):
        reads = some_reads(rng)
        plan = runs_of(tuple(reads), over)
        sources = {read.source: read.source_size for read in reads}
        held: list[list[Any]] = [[] for _ in range(size_of(over))]
        for source, size in sources.items():
            part = local_size(size, over)
            for mine, (first, end) in zip(held, spans(size, over)):
                mine += [(source, i) if i < end else None for i in range(first, first + part)]
        stock = [list(mine) for mine in held]
        for each in plan.rounds:
            assert sorted(each.to) == list(range(len(held)))
            for device, (begin, to) in enumerate(zip(each.starts, each.to)):
                stock[to] += held[device][begin : begin + each.width]
                assert len(held[device][begin : begin + each.width]) == each.width
        for result in {read.result for read in reads}:
            mine = [read for read in reads if read.result == result]
            for device, (first, end) in enumerate(spans(mine[0].result_size, over)):
                parts = plan.places[result][device]
                for i in range(first, end):
                    shift = [shift for at, shift in parts if at <= i - first][-1]
                    (expected,) = [(r.source, i + r.first) for r in mine if 0 <= i + r.first < r.source_size]
                    assert stock[device][shift + i - first] == expected


@pytest.mark.parametrize("members", [2, 3, 4, 8])
def test_a_packed_projection_sends_every_element_at_most_once(members: int) -> None:
    """Its halves lie on half of the devices each. Their gradients are put together by as much."""
    mesh = Mesh({"x": members})

    def packed(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate, value = (x @ up).chunk(2, -1)
        return (F.silu(gate) * value) @ down

    args = [rand(6, 4), rand(4, 96), rand(48, 4)]
    columns = [None, (None, "x"), ("x",)]
    program = same(lambda *args: (packed(*args),), args, mesh, columns, [(None, None)])
    *moves, reduced = program.collectives
    shard = 6 * 96 // members * 8 * (1 if members % 2 == 0 else 4 / 3)
    assert {c.kind for c in moves} == {"permute"} and reduced.kind == "all_reduce"
    assert sum(c.bytes for c in moves) <= shard
    gradients = torch.func.grad(lambda *args: packed(*args).square().sum(), (0, 1, 2))
    program = same(gradients, args, mesh, columns, [(None, None), *columns[1:]])
    moves = [c for c in program.collectives if c.kind != "all_reduce"]
    assert {c.kind for c in moves} == {"permute"}
    assert sum(c.bytes for c in moves) <= 2 * shard


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_slices_that_are_all_of_a_dim_cost_no_more_than_a_split(mesh: Mesh) -> None:
    """Also those of `glu` and its gradient, of which each is taken twice."""

    def halves(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        packed = x @ up
        n = packed.shape[-1] // 2
        return (packed[:, :n] * torch.sigmoid(packed[:, n:])) @ down

    def chunks(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        value, gate = (x @ up).chunk(2, -1)
        return (value * torch.sigmoid(gate)) @ down

    def glu(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.glu(x @ up, -1) @ down

    for width in (96, 26):
        args, over = [rand(6, 4), rand(4, width), rand(width // 2, 4)], tuple(mesh.axes)
        ins = [None, (None, over), (over,)]
        bytes_of = []
        for fn in (chunks, halves, glu):
            gradients = torch.func.grad(lambda *args, fn=fn: fn(*args).square().sum(), (0, 1, 2))
            programs = (
                same(lambda *args, fn=fn: (fn(*args),), args, mesh, ins, [(None, None)]),
                same(gradients, args, mesh, ins, [(None, None), *ins[1:]]),
            )
            bytes_of.append([sent(program) for program in programs])
        assert all(mine <= theirs for each in bytes_of for mine, theirs in zip(each, bytes_of[0]))


def test_queries_keys_and_values_share_a_permute() -> None:
    """Of three equal parts on two devices only the second half of the first and the first half of the last move."""
    program = same(lambda x: x.chunk(3, 1), [rand(4, 48)], MESHES[0], [(None, "x")], [(None, "x")] * 3)
    assert [(c.kind, c.bytes) for c in program.collectives] == [("permute", 4 * 8 * 8)]


def pieced() -> Program:
    """Programs whose results lie in parts on several devices, also unevenly."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        first, second, third = x.split([2, 6, 5])
        return torch.cat([third, first.exp(), second]), second * 2

    return partition(fn, [rand(13, 3)], MESHES[0], [("x",)], [("x",), ("x",)])


def execute(context: Context, compiled: Compiled) -> list[Tensor]:
    program = pieced()
    return Executor(program, context, compiled=compiled)(*program.local(context.rank, rand(13, 3)))


@pytest.mark.parametrize("compiled", ["none", pytest.param("all", marks=pytest.mark.slow)])
def test_ranks_execute_what_is_simulated(pool: Any, compiled: Compiled) -> None:
    program = pieced()
    expected = program.simulate(rand(13, 3))
    assert {c.kind for c in program.collectives} == {"permute"}
    for rank, actual in enumerate(pool.run(execute, compiled, world=2)):
        for mine, port, whole in zip(actual, program.outputs, expected, strict=True):
            part = port.local[0]
            theirs = whole[rank * part : (rank + 1) * part]
            torch.testing.assert_close(mine[: len(theirs)], theirs)


def test_only_what_is_read_moves() -> None:
    for read in range(2):
        program = same(lambda x, i=read: (x.chunk(2)[i],), [rand(16, 3)], Mesh({"x": 4}), [("x",)], [("x",)])
        assert sent(program) <= 2 * 2 * 3 * 8
    x, mesh = rand(8, 3), Mesh({"x": 4})
    assert sent(same(lambda x: (x.unbind()[5],), [x], mesh, [("x",)], [None])) <= sent(
        same(lambda x: (x[5],), [x], mesh, [("x",)], [None])
    )


@pytest.mark.parametrize("seed", range(10))
def test_random_splits_and_their_gradients_are_right_on_any_mesh(seed: int) -> None:
    """Also uneven ones, over two axes, put together again in another order."""
    rng = random.Random(seed)
    for _ in range(5):
        mesh, m = rng.choice(MESHES), rng.choice([2, 3, 4])
        sizes = [rng.randint(1, 9) for _ in range(rng.randint(2, 4))]
        order = rng.sample(range(len(sizes)), rng.randint(1, len(sizes)))

        def fn(x: Tensor, y: Tensor, sizes: list[int] = sizes, order: list[int] = order) -> tuple[Tensor, ...]:
            parts = x.split(sizes)
            mixed = torch.cat([*(parts[i].exp() for i in order), y])
            return (mixed, *(parts[i] * 2 for i in order))

        def gradients(x: Tensor, y: Tensor, fn: Fn = fn) -> tuple[Tensor, ...]:
            return torch.func.grad(lambda *xs: sum(out.sin().sum() for out in fn(*xs)), (0, 1))(x, y)

        ways = [("x", None), (tuple(mesh.axes), None), (tuple(mesh.axes)[::-1], None), (None, "x"), None]
        args = [rand(sum(sizes), m), rand(rng.randint(1, 9), m)]
        for each, results in ((fn, 1 + len(order)), (gradients, 2)):
            same(each, args, mesh, [rng.choice(ways) for _ in args], [rng.choice(ways) for _ in range(results)])


def test_a_long_chain_of_additions_is_partitioned() -> None:
    """As the residual stream of hundreds of layers: longer than Python's calls may nest."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        total = x * y
        for i in range(1200):
            total = total + (x if i % 2 else y)
        return (total,)

    mesh = Mesh({"x": 2})
    program = partition(fn, [torch.empty(4, 2, device="meta")] * 2, mesh, [("x",), ("x",)])
    assert not program.collectives


def test_a_merged_uneven_dim_is_divided_anew_by_neighbours() -> None:
    """7 rows of 2 on 2 devices are 8 and 6 elements; of the 14, each device gets 7 by one permute. And back."""
    for shape, view in (((3, 7, 2), (3, 14)), ((3, 14), (3, 7, 2))):
        program = same(lambda x, v=view: (x.view(v).exp(),), [rand(*shape)], MESHES[0], [(None, "x")], [(None, "x")])
        assert [(c.kind, c.bytes) for c in program.collectives] == [("permute", 3 * 8)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_uneven_views_and_their_gradients_are_right_and_send_less_than_a_gather(mesh: Mesh) -> None:
    rng = random.Random(0)
    axes = tuple(mesh.axes)
    for _ in range(12):
        rows, inner, m = rng.randint(2, 13), rng.choice([2, 3, 4]), rng.choice([1, 3])
        shapes = [(rows, inner, m), (rows * inner, m)][:: rng.choice([1, -1])]
        over = rng.choice([axes, axes[:1]])

        def fn(x: Tensor, view: tuple[int, ...] = shapes[1]) -> tuple[Tensor, ...]:
            return (x.sin().view(view).sum(-1),)

        def gradient(x: Tensor, fn: Fn = fn) -> tuple[Tensor, ...]:
            return (torch.func.grad(lambda y: fn(y)[0].square().sum())(x),)

        same(gradient, [rand(*shapes[0])], mesh, [(over,)], [(over,)])
        program = same(fn, [rand(*shapes[0])], mesh, [(over,)], [(over,)])
        part = local_size(shapes[0][0], [mesh.axis(a) for a in over]) * rows * inner * m // shapes[0][0]
        assert sent(program) <= part * (size_of(mesh.axis(a) for a in over) - 1) * 8


def some_move(rng: random.Random, n: int, m: int) -> tuple[Fn, int]:
    """A random op that moves elements of x[n, m], perhaps with another operand s; and the size of s's first dim."""
    first = rng.randint(0, n - 1)
    last, step, value = rng.randint(first + 1, n), rng.randint(1, 4), rng.choice([0.0, 2.0])
    widths = [rng.randint(0, 2), rng.randint(0, 2), rng.randint(-n // 3, n), rng.randint(-n // 3, n)]
    moves: list[tuple[Fn, int]] = [
        (lambda x, s: x[first:last:step], 1),
        (lambda x, s: torch.slice_scatter(x, s, 0, first, last, step), -(-(last - first) // step)),
        (lambda x, s: x.roll(first, 0), 1),
        (lambda x, s: x.roll((first, -1), (0, 1)), 1),
        (lambda x, s: x.flip([0]), 1),
        (lambda x, s: x.flip([0, 1]), 1),
        (lambda x, s: F.pad(x, widths, value=value), 1),
        (lambda x, s: torch.cat([x[first:], x[:first]]), 1),
    ]
    return rng.choice(moves)


@pytest.mark.parametrize("seed", range(8))
def test_random_moves_and_their_gradients_are_right_on_any_mesh(seed: int) -> None:
    """Also on dims that the axes do not divide, and over two axes, where nothing is gathered."""
    rng = random.Random(100 + seed)
    for _ in range(6):
        mesh, n, m = rng.choice(MESHES), rng.randint(4, 40), rng.choice([2, 3, 4])
        fn, rows = some_move(rng, n, m)
        args, over = [rand(n, m), rand(rows, m)], tuple(mesh.axes)

        def gradients(x: Tensor, s: Tensor, fn: Fn = fn) -> tuple[Tensor, ...]:
            return torch.func.grad(lambda x, s: fn(x, s).sin().sum() + s.sum(), (0, 1))(x, s)

        moved = same(lambda x, s, fn=fn: (fn(x, s),), args, mesh, [(over,), (over,)], [(over,)])
        assert "all_gather" not in {c.kind for c in moved.collectives}
        same(gradients, args, mesh, [(over,), (over,)], [(over,), (over,)])


def test_only_what_crosses_is_sent() -> None:
    """In rows of 8 bytes, of one device."""

    def rows(fn: Fn, n: int, out: Any = ("x",), devices: int = 8, *more: Tensor) -> float:
        args = [torch.zeros(n, 1, dtype=torch.float64), *more]
        mesh = Mesh({"x": devices})
        return sent(partition(lambda *args: (fn(*args),), args, mesh, [("x",)] * len(args), [out])) / 8

    assert rows(lambda x: x.roll(3, 0), 1000, devices=3) == 3
    assert rows(lambda x: x.flip([0]), 1000, devices=3) == 334
    assert rows(lambda x: torch.cat([x[-3:], x[:-3]]), 1000, devices=3) <= 6
    assert rows(lambda x: x[512::2], 1024) == 2 * 32
    assert rows(lambda x: F.pad(x, (0, 0, 0, 64)), 64) == 2 * 8
    assert rows(lambda x, s: torch.slice_scatter(x, s, 0, 512, 768), 1024, ("x",), 8, torch.zeros(256, 1).double()) == (
        4 * 32
    )
    assert rows(lambda s: s.new_zeros(1024, 1).slice_scatter(s, 0, 512, 1024, 2), 256) == 2 * 32
