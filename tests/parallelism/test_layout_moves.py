"""Laws of moves between layouts: what sends nothing, what takes axes in another order, what no sharding passes."""

from __future__ import annotations

import itertools

import torch
from torch.nn import functional as F
from tpshard.parallelism import Mesh, Program, mesh_split, partition
from tpshard.parallelism.anchors import is_split
from tpshard.parallelism.partitioning.partitioner import mark_outputs, partition_graph
from tpshard.parallelism.propagated import Annotation
from tpshard.parallelism.propagation.propagate import propagate
from tpshard.parallelism.resharding.reshard import cost, redistribution
from tpshard.parallelism.sharding import Layout, parse
from tpshard.parallelism.simulate import run_lockstep
from tpshard.parallelism.tracing.capture import capture
from tpshard.parallelism.why import SourcePlace


def test_shards_become_parts_of_a_sum_without_communication() -> None:
    """Each device keeps its shard, with zeros where the others' are."""
    mesh, x = Mesh({"x": 3, "y": 2}), torch.randn(7, 4)
    for before, after, copies in (
        ("[{x} {}]", "[{} {}] unreduced={x}", 2), ("[{y,x} {}]", "[{} {}] unreduced={x,y}", 1),
        ("[{y} {x}]", "[{} {}] unreduced={x,y}", 1),
    ):  # fmt: skip
        graph = capture(lambda x: mesh_split(x, mesh, [-1, -1]), [x])
        mark_outputs(graph)
        (split,) = (op for op in graph.ops if is_split(op))
        texts = {graph.inputs[0]: before, split.results[0]: after, graph.outputs[0]: after}
        annotations = {value: Annotation(parse(text, mesh), (SourcePlace(text),)) for value, text in texts.items()}
        program = partition_graph(propagate(graph, mesh, annotations))
        assert program.collectives == []
        each = run_lockstep(program, [program.local(rank, x) for rank in range(mesh.ranks)])
        torch.testing.assert_close(sum(parts[0] for parts in each), copies * x)


def test_a_view_takes_axes_in_the_order_that_divides_its_parts() -> None:
    """x of 6 does not divide the leading 4 of 24: half of x and half of y do, and nothing is gathered."""
    mesh, x = Mesh({"x": 6, "y": 4}), torch.randn(4, 12, 5)
    program = partition(lambda x: x.view(24, 2, 5), [x], mesh, [(None, ("x", "y"))], [(("x", "y"),)])
    assert not {c.kind for c in program.collectives} & {"all_gather", "all_reduce"}
    assert torch.equal(program.simulate(x)[0], x.view(24, 2, 5))


def test_a_window_as_large_as_its_input_is_summed_where_it_lies() -> None:
    """A kernel sharded as the input it slides over gives parts of the result's sum: nothing is gathered."""
    x, w = torch.randn(2, 3, 9, 8, dtype=torch.float64), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    cut = (None, None, "x")
    program = partition(lambda x, w: F.conv2d(x, w, dilation=1), [x, w], Mesh({"x": 2}), [cut, cut])
    assert sorted({c.kind for c in program.collectives}) == ["all_reduce", "permute"]
    torch.testing.assert_close(program.simulate(x, w)[0], F.conv2d(x, w))


def test_no_sharding_passes_to_a_dim_of_another_meaning() -> None:
    """The best of a sharded dim are not sharded as the dim is, nor is the half of a real transform."""
    x, mesh = torch.randn(4, 8), Mesh({"x": 2})
    for fn, size in ((lambda x, y: x.topk(4)[0] + y, 4), (lambda x, y: torch.fft.rfft(x).abs() + y, 5)):
        program = partition(fn, [x, torch.randn(4, size)], mesh, [(None, ("x", "?")), None])
        assert program.in_shardings[1] == (None, None)
    program = partition(lambda x, y: x.sort()[0] + y, [x, x], mesh, [(None, ("x", "?")), None])
    assert program.in_shardings[1] == (None, "x")


def test_uneven_pieces_change_devices_without_being_gathered() -> None:
    """19 over x of 4 begins at 0, 5, 10 and 15, and over y and half of x too: such axes may be swapped."""
    mesh, x = Mesh({"x": 4, "y": 2}), torch.randn(19, 19)
    program = partition(lambda x: x + x.T, [x], mesh, [("x", "y")], [("x", "y")])
    assert sorted(c.kind for c in program.collectives) == ["all_to_all", "permute"]
    torch.testing.assert_close(program.simulate(x)[0], x + x.T)


def test_what_is_added_by_index_is_summed_where_it_lies() -> None:
    """Many rows added to a small tensor stay where they are; x itself is added once."""
    x, index, rows = torch.randn(3, 4), torch.randint(3, (50,)), torch.randn(50, 4)
    for fn in (
        lambda x, i, rows: x.index_put((i,), rows, accumulate=True),
        lambda x, i, rows: x.index_add(0, i, rows),
        lambda x, i, rows: x.scatter_add(0, i[:, None].expand(50, 4), rows),
    ):
        program = partition(fn, [x, index, rows], Mesh({"x": 4}), [(), ("x",), ("x",)], [()])
        assert [c.kind for c in program.collectives] == ["all_reduce"]
        torch.testing.assert_close(program.simulate(x, index, rows)[0], fn(x, index, rows))


def targets(program: Program) -> set[object]:
    return {node.target for node in program.nodes}


def test_two_slices_put_together_in_turn_are_one_shift() -> None:
    """cat([x[k:], x[:k]]) of a sharded dim sends k elements to a neighbour, once."""
    x = torch.randn(12, 2)
    program = partition(lambda x: torch.cat([x[10:], x[:10]]), [x], Mesh({"x": 4}), [("x",)], [("x",)])
    assert [(c.kind, c.bytes) for c in program.collectives] == [("permute", 2 * 2 * 4)]
    assert torch.equal(program.simulate(x)[0], x.roll(2, 0)) and torch.ops.aten.mul.Tensor not in targets(program)

    def turned(x: torch.Tensor) -> torch.Tensor:  # as rotary positions do
        return torch.cat([-x[6:], x[:6]])

    def of_halves(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2)
        return torch.cat([-second, first])

    gradient = torch.func.grad(lambda x: turned(x).sin().sum())
    for fn, shifts in ((turned, 1), (of_halves, 1), (gradient, 2), (lambda x: torch.cat([x[6:], -x[:6]]), 1)):
        program = partition(fn, [x], Mesh({"x": 4}), [("x",)], [("x",)])
        assert [(c.kind, c.bytes) for c in program.collectives] == [("permute", 3 * 2 * 4)] * shifts
        assert torch.equal(program.simulate(x)[0], fn(x))


def test_a_padding_and_the_window_that_reads_it_exchange_once() -> None:
    """A causal convolution of a sharded sequence needs the last rows of one neighbour, and nothing else."""
    x, w = torch.randn(2, 3, 16, dtype=torch.float64), torch.randn(5, 3, 4, dtype=torch.float64)

    def causal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv1d(F.pad(x, (3, 0)), w)

    cut = (None, None, "x")
    for mesh in (Mesh({"x": 4}), Mesh({"x": 3})):
        program = partition(causal, [x, w], mesh, [cut, ()], [cut])
        assert [(c.kind, c.bytes) for c in program.collectives] == [("permute", 2 * 3 * 3 * 8)]
        torch.testing.assert_close(program.simulate(x, w)[0], causal(x, w))


def test_a_plan_slices_and_permutes_before_it_gathers() -> None:
    """Axes go where the target has them while pieces are small: no plan sends more than these four steps."""
    mesh, shape = Mesh({"x": 2, "y": 2, "z": 2, "w": 16}), (16, 8)
    texts = ("[{y,w:(4)2,z,w:(1)2} {}]", "[{y,w:(4)2,z,w:(1)2} {x,w:(2)2,w:(8)2}]", "[{y,z,w:(1)2,w:(8)2} {x,w:(2)4}]",
             "[{y,z,w:(1)2} {x,w:(2)8}]", "[{y} {x,w:(2)8}]")  # fmt: skip
    layouts = [Layout(parse(text, mesh).dims) for text in texts]
    by_hand = sum(
        cost(redistribution(shape, one, other, 4, 0), shape, 4, 0) for one, other in itertools.pairwise(layouts)
    )
    assert cost(redistribution(shape, layouts[0], layouts[-1], 4, 0), shape, 4, 0) <= by_hand
