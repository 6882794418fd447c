"""Small programs with the expected shardings beside them, and the recorded reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from tpshard.parallelism import Mesh, mesh_split, partition
from tpshard.parallelism.partitioning.partitioner import mark_outputs
from tpshard.parallelism.partitioning.reasons import PropagatedReasons
from tpshard.parallelism.propagated import Annotation
from tpshard.parallelism.propagation.propagate import propagate
from tpshard.parallelism.sharding import parse
from tpshard.parallelism.tracing.capture import capture
from tpshard.parallelism.why import SourcePlace, chain

MESH = Mesh({"a": 2, "b": 2, "c": 2})


def product(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("ij,jk->ik", x, y)


CASES: list[
    tuple[str, Callable[..., Any], list[tuple[int, ...]], list[str | None], list[str | None], list[str], list[str]]
]
CASES = [
    ("both directions", product, [(8, 8), (8, 8)], ["[{a} {}]", None], ["[{?} {b}]"],
     ["[{a} {}]", "[{?} {b,?}]"], ["[{a,?} {b}]"]),
    ("a closed dim stays", lambda x, y: x + y, [(8, 8), (8, 8)], ["[{} {}]", "[{a} {b}]"], [None],
     ["[{} {}]", "[{a} {b}]"], ["[{a,?} {b,?}]"]),
    ("an axis that two dims want goes to the larger operand's", product, [(8, 4), (4, 16)],
     ["[{a,b} {?}]", "[{?} {a,c}]"], [None], ["[{a,b} {?}]", "[{?} {a,c}]"], ["[{?} {a,c,?}]"]),
    ("an operation's free dims come before its summed ones", product, [(32, 1024), (1024, 16)],
     [None, "[{a,?} {b,?}]"], ["[{a,?} {b,?}]"], ["[{a,?} {?}]", "[{a,?} {b,?}]"], ["[{a,?} {b,?}]"]),
    ("a later priority takes what is left", lambda x, y: x + y, [(8, 8), (8, 8)], ["[{a,?}p1 {?}p0]", "[{?} {a,b}]"],
     [None], ["[{a,?}p1 {?}p0]", "[{?} {a,b}]"], ["[{?} {a,b,?}]"]),
    ("a view splits an axis", lambda x: x.view(4, 4), [(16,)],
     ["[{b,a,c}]"], [None], ["[{b,a,c}]"], ["[{b,a,?} {c,?}]"]),
    ("an axis need not divide its dim", lambda x: x + x, [(8, 3)], ["[{} {a,b}]"], [None], ["[{} {a,b}]"],
     ["[{?} {a,b,?}]"]),
    ("nor the part of a dim that is split", lambda x: x.view(3, 4), [(12,)], ["[{a}]"], [None], ["[{a}]"],
     ["[{a,?} {?}]"]),
    ("a tensor gets what all that have its dim agree on", lambda x, y: x + y, [(8,), (8,)], ["[{a,b}]", "[{a,c}]"],
     [None], ["[{a,b}]", "[{a,c}]"], ["[{a,?}]"]),
    ("the axes of a later priority are kept for it", lambda x, y: x + y, [(8, 8), (8, 8)],
     ["[{?}p0 {a,?}p2]", "[{a,b,?} {?}]"], [None], ["[{?}p0 {a,?}p2]", "[{a,b,?} {?}]"], ["[{a,b,?} {?}]"]),
    ("an axis of a sum to be made shards no dim of it", lambda x, y: x + y, [(8, 8), (8, 8)],
     ["[{?} {?}] unreduced={a}", "[{a} {b}]"], [None], ["[{?} {b,?}] unreduced={a}", "[{a} {b}]"], ["[{a,?} {b,?}]"]),
    ("an axis to stay replicated shards no dim", lambda x, y: x + y, [(8, 8), (8, 8)],
     ["[{?} {?}] replicated={a}", "[{b,a} {}]"], [None], ["[{b,?} {?}] replicated={a}", "[{b,a} {}]"],
     ["[{b,a,?} {?}]"]),
    ("a sum carries what it keeps", lambda x: x.sum(1), [(8, 8)], ["[{b} {a}]"], [None], ["[{b} {a}]"], ["[{b,?}]"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "fn", "shapes", "arguments", "results", "inputs", "outputs"), CASES, ids=[c[0] for c in CASES]
)
def test_answer(
    what: str, fn: Callable[..., Any], shapes: list[tuple[int, ...]], arguments: list[str | None],
    results: list[str | None], inputs: list[str], outputs: list[str],
) -> None:  # fmt: skip
    graph = capture(fn, [torch.empty(s, device="meta") for s in shapes])
    mark_outputs(graph)
    values = [*graph.inputs, *graph.outputs]
    annotations = {
        value: Annotation(parse(text, MESH), (SourcePlace(f"line {i}"),))
        for i, (value, text) in enumerate(zip(values, [*arguments, *results], strict=True))
        if text is not None
    }
    shardings = propagate(graph, MESH, annotations)
    assert [shardings.of[v].show(MESH) for v in values] == [*inputs, *outputs], what
    for value in values:
        for dim, axes in enumerate(shardings.of[value].dims):
            for axis in axes:
                last = chain(PropagatedReasons(shardings), MESH, value.name, dim, axis)[-1]
                assert last.written_at[0].source.startswith("line ")


def test_explanation_ends_at_the_annotation() -> None:
    program = partition(lambda x, w: torch.relu(x @ w).sum(), [torch.empty(8, 8), torch.empty(8, 16)], MESH,
                        [("a",), (None, "b")])  # fmt: skip
    (comm,) = program.collectives
    assert comm.kind == "all_reduce" and comm.axes == ("a", "b")
    relu = next(name for name in program.records if "relu" in name)
    assert program.sharding_of(relu) == ("a", "b")
    assert "in_shardings[0]" in program.explain(relu) and "in_shardings[1]" in program.explain(relu)


@pytest.mark.parametrize("text", ["[{a:(1)2,?} {a:(2)2,b}]", "[{b@p1} {?}]"])
def test_a_text_annotates_a_value_and_its_gradient_inside_a_function(text: str) -> None:
    mesh = Mesh({"a": 4, "b": 2})
    x, w = torch.randn(8, 6, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)

    def gradient(x: Tensor, w: Tensor) -> Tensor:
        return torch.func.grad(lambda w: mesh_split(x @ w, mesh, text).relu().square().sum())(w)

    program = partition(gradient, [x, w], mesh, [("a",), None])
    torch.testing.assert_close(program.simulate(x, w)[0], gradient(x, w))
    splits = [record.layout for name, record in program.records.items() if name.startswith("mesh_split")]
    assert len(splits) == 2
    assert all(split.dims == parse(text, mesh).dims for split in splits)
