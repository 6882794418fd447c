"""Random functions with random, also uneven, shardings equal one device's results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from tpshard.parallelism import Mesh, Program, partition
from tpshard.parallelism.anchors import split_annotations
from tpshard.parallelism.mesh import Axis, starts_with
from tpshard.parallelism.partitioning.partitioner import mark_outputs
from tpshard.parallelism.partitioning.reasons import PropagatedReasons
from tpshard.parallelism.program import info
from tpshard.parallelism.propagated import Annotation
from tpshard.parallelism.propagation.propagate import propagate
from tpshard.parallelism.sharding import Sharding
from tpshard.parallelism.simulate import join, local_arguments, run_lockstep
from tpshard.parallelism.tracing.capture import capture
from tpshard.parallelism.why import SourcePlace
from tpshard.parallelism.why import chain as steps_of

from fuzz import closeness, difference
from fuzzed import Case, numbered
from fuzzed import case as of_family
from fuzzed.ties import only_ties

CASES, PARTS = 208, 8
"""Programs, about four of each family."""
FOUND = [("conv3d", 47), ("casts", 250), ("written_views", 330), ("repeated", 342)]
"""Programs that once were wrong, or crashed."""
torch.set_num_threads(1)


def chain(seed: int) -> Case:
    return of_family("chain", seed)


def _program(case: Case) -> Program:
    return partition(case.fn, case.args, case.mesh, case.in_shardings, case.out_shardings)


def _moved_bytes(node: fx.Node, operands: list[Tensor], results: list[Tensor]) -> int:
    """The buffer that the ring cost multiplies, from the tensors themselves."""
    if "all_gather" in str(node.target):
        return results[0].nbytes
    return operands[0].nbytes


@pytest.mark.parametrize("part", range(PARTS))
def test_devices_together_compute_what_one_does(part: int) -> None:
    refused = 0
    cases = [numbered(number) for number in range(part, CASES, PARTS)]
    for case in cases + [of_family(*actual) for actual in FOUND[part::PARTS]]:
        shown = str(case)
        try:
            expected = case.expected()
            program = _program(case)
        except ValueError:
            refused += 1
            continue
        counted: list[tuple[str, int]] = []
        try:
            results = run_lockstep(
                program,
                [local_arguments(program, rank, case.args) for rank in range(case.mesh.ranks)],
                lambda node, reads, outs, into=counted: into.append((node.name, _moved_bytes(node, reads, outs))),
            )
        except Exception as error:
            raise AssertionError(shown) from error
        for i, (port, want) in enumerate(zip(program.outputs, expected, strict=True)):
            got = join(port, case.mesh, [mine[i] for mine in results])
            if difference(got, want, closeness(program)):
                wholes = [join(at, case.mesh, [mine[j] for mine in results]) for j, at in enumerate(program.outputs)]
                tied = only_ties(case, wholes, expected, closeness(program))
                assert tied, f"{shown}\nresult {i}: {got} and {want}"
        for dims, port in zip(case.out_shardings or (), program.outputs):
            if dims is not None:
                assert port.layout.dims == Sharding.of(case.mesh, dims, len(port.shape)).dims, shown
        assert counted == [(node.name, comm.bytes) for node, comm in program.issues()], shown
        assert not any(port.layout.partial for port in program.outputs), shown
        _check_specs(program, results, shown)
    assert refused <= 0.03 * CASES / PARTS + 1


def test_only_another_order_of_equal_elements_is_a_tie() -> None:
    values = torch.tensor([[3.0, 1.0, 3.0, 3.0], [4.0, 3.0, 2.0, 1.0]], dtype=torch.float64)
    top_2, in_order = lambda x: x.topk(2, 1).indices, lambda x: x.sort(dim=1, stable=True).indices
    case = Case("tied", 0, Mesh({"x": 2}), [values], [("", top_2, [0]), ("", in_order, [0])], [1, 2], False)
    top, ordered = case.expected()
    other = top.clone()
    other[0] = torch.tensor([3, 2] if top[0].tolist() != [3, 2] else [0, 2])
    assert only_ties(case, [other, ordered], [top, ordered], 1e-6)
    assert not only_ties(case, [top, ordered], [top, ordered], 1e-6)
    assert not only_ties(case, [top.flip(1), ordered], [top, ordered], 1e-6)  # the second row has no equal elements
    assert not only_ties(case, [other, ordered.flip(1)], [top, ordered], 1e-6)  # a stable sort has one answer


def _check_specs(program: Program, results: list[list[Tensor]], shown: str) -> None:
    """The shapes that the program says are those that it has."""
    output = program.nodes[-1]
    flat = [node for node in output.args[0] if isinstance(node, fx.Node)]  # type: ignore[union-attr]
    for i, node in enumerate(flat):
        assert info(node).specs[0].shape == tuple(results[0][i].shape), shown
        assert info(node).specs[0].dtype == results[0][i].dtype, shown


@pytest.mark.parametrize("seed", range(CASES, CASES + 24))
def test_propagation_keeps_its_laws(seed: int) -> None:
    """Annotations stay and closed dims are not touched; twice is once; every axis has a chain to an annotation."""
    case = chain(seed)
    graph = capture(case.fn, case.args)
    mark_outputs(graph)
    inputs = dict(split_annotations(graph, case.mesh))
    for value, dims in zip(graph.inputs, case.in_shardings):
        if dims is not None:
            inputs[value] = Annotation(Sharding.of(case.mesh, dims, value.rank), (SourcePlace(f"here:{value.name}"),))
    once = propagate(graph, case.mesh, inputs)
    for value, annotation in inputs.items():
        for dim, axes in enumerate(annotation.sharding.dims):
            assert once.of[value].dims[dim] == axes or annotation.sharding.open[dim], case
            assert starts_with(once.of[value].dims[dim], axes), case
    places = {a.written_at for a in inputs.values()}
    for value, sharding in once.of.items():
        flat: list[Axis] = list(sharding.axes)
        for i, axis in enumerate(flat):
            assert not any(axis.overlaps(other) for other in flat[i + 1 :]), (value, case)
        for dim, axes in enumerate(sharding.dims):
            for axis in axes:
                last = steps_of(PropagatedReasons(once), case.mesh, value.name, dim, axis)[-1]
                assert last.written_at in places, (value, dim, axis, case)
    again = propagate(graph, case.mesh, {v: Annotation(s) for v, s in once.of.items()})
    assert again.of == once.of, case


@pytest.mark.parametrize("seed", range(0, 24, 3))
def test_same_function_same_program(seed: int) -> None:
    case = chain(seed)
    assert _program(case).fingerprint == _program(chain(seed)).fingerprint
