"""The module and role of every op and value are recorded while tracing and survive every rewrite."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.parallelism import Mesh, partition
from tpshard.parallelism.annotate import role
from tpshard.parallelism.graph import Layer, Place
from tpshard.parallelism.partitioning.partition import partition_captured
from tpshard.parallelism.partitioning.partitioner import mark_outputs, partition_graph
from tpshard.parallelism.program import info
from tpshard.parallelism.propagated import Annotation
from tpshard.parallelism.propagation.propagate import propagate
from tpshard.parallelism.rules.table import entry_of
from tpshard.parallelism.sharding import parse
from tpshard.parallelism.tracing.capture import Trail, capture


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.inner:
            x = linear(x).relu()
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.first(x)))


def step(trail: Trail, model: nn.Module):
    names = [name for name, _ in model.named_parameters()]

    def fn(x: Tensor, target: Tensor, *parameters: Tensor) -> list[Tensor]:
        used = dict(zip(names, (p.detach().requires_grad_() for p in parameters)))
        with trail.watch(model):
            logits = role(torch.func.functional_call(model, used, (x,)), "logits")
        with trail.inside(Place("loss", role="loss")):
            loss = F.cross_entropy(logits, target)
        with trail.backward(loss):
            return [loss.detach(), *torch.autograd.grad(loss, list(used.values()))]

    return fn


def arguments(model: nn.Module) -> list[Tensor]:
    return [torch.randn(4, 8), torch.randint(12, (4,)), *(p.detach() for p in model.parameters())]


def test_ops_know_their_module_layer_and_phase() -> None:
    model, trail = Model(), Trail()
    graph = capture(step(trail, model), arguments(model), trail=trail)
    layers = {op.place.module: op.place.layer for op in graph.ops}
    assert layers["first"] is None and layers["head"] is None
    assert layers["blocks.0.inner.1"] == Layer("blocks", 0)  # the outermost
    assert layers["blocks.1.inner.0"] == Layer("blocks", 1)
    for module in ("first", "blocks.0.inner.0", "blocks.1.inner.1", "head", "loss"):
        assert {op.phase for op in graph.ops if op.module == module} == {"forward", "backward"}, module


def test_roles_hold_for_a_value_and_its_gradient_and_leave_no_trace() -> None:
    model, trail, mesh = Model(), Trail(), Mesh({"x": 2})
    inputs = arguments(model)
    graph = capture(step(trail, model), inputs, trail=trail)
    assert not any("role" in str(op.target) for op in graph.ops)
    program = partition_captured(graph, mesh, [("x",), ("x",), *[None] * (len(inputs) - 2)])
    by_role = {r: [n for n in program.nodes if info(n).place.role == r] for r in ("logits", "loss")}
    actual = {info(n).specs[0].shape for n in by_role["logits"] if info(n).specs and entry_of(n.target).view is None}
    assert actual == {(2, 12)}
    phases = {info(n).phase for n in by_role["logits"]}
    assert phases == {"forward", "backward"}
    assert {info(n).phase for n in by_role["loss"]} == {"forward", "backward"}
    products = [n for n in program.nodes if "mm" in str(n.target) and info(n).place.role == "logits"]
    assert len(products) == 1  # the head's; the products of its gradient make no logits
    for got, want in zip(program.simulate(*inputs), step(Trail(), model)(*inputs), strict=True):
        torch.testing.assert_close(got, want)


def test_a_reason_leads_through_paddings_that_became_one_concatenation() -> None:
    def join(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        pad = torch.ops.aten.constant_pad_nd
        return pad(a, [0, 0, 0, 4], 0) + pad(b, [0, 0, 4, 0], 0)  # type: ignore[no-any-return]

    program = partition(join, [torch.ones(4, 3), torch.ones(4, 3)], Mesh({"x": 2}), [("x",), ("x",)])
    assert not any("pad" in name for name in program.records)
    links = program.explanation_of("add").links
    assert [hop.value for hop in links] == ["add", "constant_pad_nd", "arg0"]


def test_a_collective_says_why_as_values_and_in_words() -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    program = partition(torch.matmul, [a, b], Mesh({"x": 2}), [(None, "x"), ("x",)])
    (comm,) = program.collectives
    (need,) = comm.why
    assert (need.kind, need.op.target, need.axis) == ("sum", "contract", "x")
    assert comm.value == (need.value,) and need.before.endswith("{U_x}")
    assert [place.source for place in need.written_at] == ["in_shardings[0] = (None, 'x')"]
    assert comm.reason.startswith(f"`{need.op.name}` sums over a sharded dim: {need.value}[")
    place = program.explanation_of("arg0")
    assert place.roots == need.written_at and program.explain("arg0").endswith(
        "annotated at in_shardings[0] = (None, 'x')"
    )


def test_a_sum_that_is_given_names_no_op_that_made_it() -> None:
    mesh = Mesh({"x": 2})
    graph = capture(lambda x: x, [torch.randn(4)])
    mark_outputs(graph)
    inputs = {graph.inputs[0]: "[{}] unreduced={x}", graph.outputs[0]: "[{}]"}
    annotations = {value: Annotation(parse(text, mesh)) for value, text in inputs.items()}
    (comm,) = partition_graph(propagate(graph, mesh, annotations)).collectives
    assert comm.why[0].kind == "given" and comm.reason.startswith(
        "`arg0` is given as a sum over devices: arg0[I] {U_x} -> [I]"
    )
