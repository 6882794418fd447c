"""A capture records the ops that torch's tracer records, and refuses what a static graph cannot express."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from tpshard.parallelism import Mesh, partition
from tpshard.parallelism.graph import Place
from tpshard.parallelism.rules.table import entry_of
from tpshard.parallelism.tracing.capture import capture
from tpshard.parallelism.tracing.recorder import Recorder, decompositions

from fuzzed import numbered

Seen = list[tuple[str, Any, list[tuple[int, ...]]]]


def _fakes(args: list[Tensor]) -> list[Tensor]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [torch.empty(arg.shape, dtype=arg.dtype) for arg in args]


def _record(fn: Callable[..., Any], args: list[Tensor]) -> Seen:
    fakes = _fakes(args)
    with fakes[0].fake_mode:  # type: ignore[attr-defined]
        recorder = Recorder(Place)
        for i, fake in enumerate(fakes):
            recorder.input(f"arg{i}", fake)
        with recorder:
            results = fn(*fakes)
    ops = [op for op in recorder.graph(results).ops if entry_of(op.target).recorded != "operand"]
    return [(op.name, op.target, [v.shape for v in op.results]) for op in ops]


def _once() -> dict[Any, Callable[..., Any]]:
    """The decompositions; one that ends in the op itself is not split again."""
    splitting: list[Any] = []

    def guard(func: Any, split: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if func in splitting:
                return NotImplemented
            splitting.append(func)
            try:
                return split(*args, **kwargs)
            finally:
                splitting.pop()

        return run

    return {func: guard(func, split) for func, split in decompositions().items()}


def _trace(fn: Callable[..., Any], args: list[Tensor]) -> Seen:
    tracer = make_fx(fn, decomposition_table=_once(), tracing_mode="fake", _allow_non_fake_inputs=True)
    result = tracer(*_fakes(args))
    calls = []
    for node in result.graph.nodes:
        counted = isinstance(node.target, torch._ops.OpOverload) and entry_of(node.target).recorded != "operand"
        if node.op == "call_function" and counted:
            fake = node.meta["val"]
            result = fake if isinstance(fake, (list, tuple)) else [fake]
            calls.append((node.name, node.target, [tuple(getattr(f, "shape", ())) for f in result]))
    return calls


def test_every_op_is_recorded_as_torch_traces_it() -> None:
    for number in range(49):
        case = numbered(number)
        if case.family == "statistics" or case.draws:
            continue  # one branches on data, and torch traces draws as they are
        assert _record(case.fn, case.args) == _trace(case.fn, case.args), str(case)


def test_constants_and_changes_in_place_are_recorded() -> None:
    outside = torch.arange(4.0)

    def fn(x: Tensor) -> Any:
        lifted = torch.tensor([1.0, 2.0, 3.0, 4.0])
        changed = (x * 2).add_(lifted)
        return changed * outside + outside, x, 3

    graph = capture(fn, [torch.empty(4)])
    assert [str(op.target) for op in graph.ops] == [
        "aten.mul.Tensor", "aten.add.Tensor", "aten.mul.Tensor", "aten.add.Tensor",
    ]  # fmt: skip
    lifted, inputs = (tensor for _, tensor in graph.constants.values())
    assert lifted.tolist() == [1.0, 2.0, 3.0, 4.0] and inputs is outside
    assert graph.ops[2].operands[0] is graph.ops[1].results[0], "what reads after the change reads the new value"
    assert graph.outputs[1] is graph.inputs[0] and graph.outputs[2] == 3


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: x if x.sum() > 0 else -x, "reads an element's value"),
        (lambda x: x * len(x.tolist()), "reads an element's value"),
        (lambda x: x.nonzero(), "shape depends on data"),
    ],
)
def test_what_a_static_graph_cannot_hold_is_refused(fn: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        capture(fn, [torch.empty(4)])


def test_readers_of_a_constant_do_not_see_each_other() -> None:
    """Zeros and positions that two operations read are made for each: neither's sharding reaches the other."""

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(8.0)[:, None].expand(8, 8)
        return x + places, (y - places) * places

    mesh = Mesh({"a": 2, "b": 2})
    program = partition(f, [torch.empty(8, 8), torch.empty(8, 8)], mesh, [("a",), (None, "b")])
    assert program.out_shardings == [("a", None), (None, "b")] and not program.collectives
    x = torch.randn(8, 8)
    for mine, whole in zip(program.simulate(x, x), f(x, x)):
        torch.testing.assert_close(mine, whole)


def test_a_transform_of_a_function_with_one_hot_is_captured() -> None:
    x, picked = torch.randn(4, 8), torch.randint(4, (6,))

    def gradient(x: Tensor, picked: Tensor) -> Tensor:
        return torch.func.grad(lambda x: (torch.nn.functional.one_hot(picked, 4).to(x.dtype) @ x).square().sum())(x)

    program = partition(gradient, [x, picked], Mesh({"a": 2}), [("a",), ("a",)])
    torch.testing.assert_close(program.simulate(x, picked)[0], gradient(x, picked))


SUBSTITUTED: list[Callable[[Tensor], Tensor]] = [
    torch.cov,
    lambda x: x[0].cov(correction=0),
    lambda x: torch.cov(x[:, :1], correction=0),
    lambda x: torch.cov((9 * x).long()),
    torch.corrcoef,
    lambda x: x[0].corrcoef(),
    lambda x: torch.nn.functional.gaussian_nll_loss(x, x.tanh(), x.abs(), full=True),
    lambda x: torch.nn.functional.gaussian_nll_loss(x, x.tanh(), x[:, 0].abs() / 1e6, reduction="none"),
    lambda x: torch.nn.functional.instance_norm(x[None], weight=x[:, 1], bias=x[:, 2]),
    lambda x: torch.nn.functional.instance_norm(
        x[None], (0 * x[:, 0]).detach(), x[:, 1].detach() ** 2, use_input_stats=False
    ),
    lambda x: torch.nn.InstanceNorm1d(4, track_running_stats=True, dtype=x.dtype)(x[None]),
    lambda x: torch.nn.functional.pad(x[None], (2, 3), mode="circular"),
    lambda x: torch.nn.functional.pad(x[None], (-1, 2), mode="circular"),
    lambda x: torch.stft(x, 4, 2, 3, x[0, :3].detach(), normalized=True, return_complex=True).abs(),
    lambda x: x[0].stft(4, 1, center=False, onesided=False, return_complex=True).abs(),
]


@pytest.mark.parametrize("number", range(len(SUBSTITUTED)))
def test_functions_that_others_stand_for_are_captured(number: int) -> None:
    fn, x = SUBSTITUTED[number], torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def with_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        y = fn(x)
        return y.detach(), torch.autograd.grad(y.sum() + 0 * x.sum(), x)[0]

    program = partition(with_gradient, [x], Mesh({"a": 2, "b": 3}), [("a", "b")])
    for actual, expected in zip(program.simulate(x), with_gradient(x), strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True)


def test_weights_of_a_covariance_are_read_so_that_it_is_refused() -> None:
    with pytest.raises(ValueError, match="static graph"):
        capture(lambda x, w: torch.cov(x, fweights=w), [torch.randn(2, 3), torch.ones(3, dtype=torch.int64)])
