"""Random numbers are the same on every mesh, forward and backward, with the right distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from tpshard.parallelism import Mesh, partition
from tpshard.parallelism.draws import RANDOM, random, strides_of
from tpshard.parallelism.rules import drawn as table_of_draws
from tpshard.parallelism.rules.table import name_of
from tpshard.parallelism.runtime.compiled import compile_graph
from tpshard.parallelism.simulate import run_lockstep
from tpshard.parallelism.tracing.capture import capture
from tpshard.parallelism.tracing.recorder import Recorder

aten = torch.ops.aten
ONE = Mesh({"x": 1})
SPREAD: list[tuple[Mesh, Any]] = [
    (Mesh({"x": 2}), ("x",)), (Mesh({"x": 3}), (None, "x")), (Mesh({"x": 2, "y": 2}), ("y", "x")),
    (Mesh({"x": 4}), (("x", 1, 2), ("x", 2, 2))), (Mesh({"x": 2, "y": 3}), (("x", "y"),)),
    (Mesh({"x": 2, "y": 2}), (None, ("y", "x"), None)),
]  # fmt: skip
"""Meshes, and how an input of [9, 10, 4] lies on them: unevenly, over two dims, by parts of an axis."""


def drawn(x: Tensor) -> list[Tensor]:
    """A draw of every kind, none of which rounds otherwise on another mesh."""
    filled = torch.empty_like(x)
    return [
        torch.rand_like(x), torch.randn(9, 10, 1) * torch.ones_like(x), torch.randint(3, 8, (9, 10, 4)) + 0 * x,
        x.new_empty(9, 10, 4).uniform_(-1, 1), filled.normal_(2, 3), torch.bernoulli(torch.rand(10, 4)) + 0 * x,
        torch.randint_like(x, 5), torch.empty_like(x).bernoulli_(0.3), torch.empty_like(x).exponential_(2.0),
        torch.empty_like(x).random_(4, 9), torch.normal(x * 0, 1.0), torch.randperm(9).view(9, 1, 1) + 0 * x,
        torch.empty_like(x).geometric_(0.4), F.dropout(x, 0.4), F.dropout1d(x, 0.5), F.rrelu(x, training=True),
        torch.ops.aten.native_dropout(x, 0.2, True)[0], torch.rand(4, dtype=torch.bfloat16).float() + 0 * x,
        aten.uniform.default(x, 1, 2), aten.normal_functional(x, 1, 2), aten.exponential.default(x),
        aten.cauchy.default(x), aten.log_normal.default(x), aten.geometric.default(x, 0.5),
        torch.empty_like(x).cauchy_(), torch.randn_like(x),
        torch.empty_like(x).log_normal_(), F.rrelu(x.clone(), training=True, inplace=True),
        torch.multinomial(x.abs().reshape(9, 40) + 1, 4).view(9, 1, 4) + 0 * x,
    ]  # fmt: skip


@pytest.mark.parametrize(("mesh", "lies"), SPREAD, ids=str)
def test_every_mesh_draws_the_same(mesh: Mesh, lies: Any) -> None:
    x = torch.linspace(-2, 2, 360).view(9, 10, 4)
    program = partition(drawn, [x], mesh, [lies])
    whole, parts = partition(drawn, [x], ONE).simulate(x, seed=5), program.simulate(x, seed=5)
    for i, (one, other) in enumerate(zip(whole, parts, strict=True)):
        assert torch.equal(one, other), i
    actual = [node for node in program.graph.nodes if node.target is RANDOM]
    assert any(node.meta["tpshard"].specs[0].shape != (9, 10, 4) for node in actual), "a device draws its part alone"


def test_every_op_that_draws_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[str] = set()
    dispatch = Recorder.__torch_dispatch__

    def dispatched(self: Recorder, func: Any, *rest: Any) -> Any:
        names.update((name_of(func), name_of(getattr(func, "overloadpacket", func))))
        return dispatch(self, func, *rest)

    monkeypatch.setattr(Recorder, "__torch_dispatch__", dispatched)
    capture(drawn, [torch.ones(9, 10, 4)])
    assert {name_of(op) for op in table_of_draws.OPS} <= names


def attend(q: Tensor, w: Tensor) -> list[Tensor]:
    """Attention with dropout and a product, with the gradients of both inputs."""
    q, w = (t.detach().requires_grad_() for t in (q, w))
    out = F.dropout(F.scaled_dot_product_attention(q, q, q, dropout_p=0.3) @ w, 0.5)
    return [out.detach(), *torch.autograd.grad((out * out).sum(), (q, w))]


@pytest.mark.parametrize(("mesh", "lies"), SPREAD[:5], ids=str)
def test_what_is_dropped_has_no_gradient_on_any_mesh(mesh: Mesh, lies: Any) -> None:
    q, w = torch.randn(3, 5, 9, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    whole = partition(attend, [q, w], ONE).simulate(q, w, seed=1)
    for one, other in zip(whole, partition(attend, [q, w], mesh, [lies, None]).simulate(q, w, seed=1), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    dropped = capture(lambda x: grad_of_dropout(x), [q])
    assert sum(op.target is RANDOM for op in dropped.ops) == 1, "forward and backward read one draw"


def grad_of_dropout(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    out = F.dropout(x, 0.25)
    return out.detach(), torch.autograd.grad(out.sum(), x)[0]


def test_the_seed_decides() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    x = torch.zeros(64, 64)
    program = partition(noisy, [x], Mesh({"x": 2}), [("x",)])
    assert program.inputs[-1].name == "seed" and len(program.in_shardings) == 2
    torch.manual_seed(3)
    (first,), (again,), (other,) = program.simulate(x), program.simulate(x), program.simulate(x, seed=4)
    assert torch.equal(first, again) and torch.equal(first, program.simulate(x, seed=3)[0])
    assert (first == other).float().mean() < 0.01
    parts = run_lockstep(program, [program.local(rank, x, seed=4) for rank in range(2)])
    assert torch.equal(torch.cat([part[0] for part in parts]), other)
    with pytest.raises(ValueError, match="2 tensors were given to a program with 1 inputs"):
        program.simulate(x, torch.tensor(4))


def test_one_draw_does_not_tell_another() -> None:
    """Draws of one function, neighbours of one draw, and draws of near seeds are independent."""

    def three(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.rand(1 << 16), torch.rand(1 << 16)

    program = partition(three, [torch.zeros(1)], ONE)
    one, two = program.simulate(torch.zeros(1), seed=0)
    (near, _) = program.simulate(torch.zeros(1), seed=1)
    pairs = [(one, two), (one, near), (two, near), (one[1:], one[:-1]), (one[256:], one[:-256])]
    assert all(abs(torch.corrcoef(torch.stack(pair))[0, 1]) < 0.016 for pair in pairs)  # four deviations


MOMENTS: list[tuple[Callable[[Tensor], Tensor], float, float]] = [
    (torch.rand_like, 1 / 2, 1 / 12), (torch.randn_like, 0.0, 1.0), (lambda x: torch.randint_like(x, 2, 12), 6.5, 8.25),
    (lambda x: torch.empty_like(x).bernoulli_(0.3), 0.3, 0.21),
    (lambda x: torch.empty_like(x).exponential_(2), 0.5, 0.25),
    (lambda x: torch.empty_like(x).geometric_(0.5), 2.0, 2.0), (lambda x: torch.normal(x - x + 4, 3.0), 4.0, 9.0),
    (lambda x: F.dropout(torch.ones_like(x), 0.2), 1.0, 0.25),
    (lambda x: torch.empty_like(x).log_normal_(0, 0.5), 1.1331, 0.3647),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "mean", "variance"), MOMENTS)
def test_draws_are_distributed_as_torch_says(fn: Callable[[Tensor], Tensor], mean: float, variance: float) -> None:
    x = torch.zeros(1 << 17, dtype=torch.float64)
    (actual,) = partition(fn, [x], ONE).simulate(x, seed=11)
    assert float(actual.mean()) == pytest.approx(mean, abs=5 * (variance / actual.numel()) ** 0.5)
    assert float(actual.var()) == pytest.approx(variance, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_a_part_is_the_part_of_the_whole(dtype: torch.dtype) -> None:
    """In pieces or at once: what a device makes is what stands there in the whole tensor, and below 1."""
    shape, seed = (3, 700, 90), torch.tensor(9)
    whole = RANDOM(seed, 4, list(shape), [0, 0, 0], strides_of(shape), dtype)
    assert torch.equal(whole, random(seed, 4, shape, [0, 0, 0], strides_of(shape), dtype))
    part = RANDOM(seed, 4, [2, 300, 45], [1, 350, 30], strides_of(shape), dtype)
    assert torch.equal(part, whole[1:3, 350:650, 30:75])
    assert whole.dtype == dtype and (whole >= 0).all() and (dtype is torch.int64 or (whole < 1).all())


@pytest.mark.slow
def test_a_compiler_draws_the_same() -> None:
    def several(x: Tensor) -> list[Tensor]:
        return [torch.rand(500) + 0 * x, torch.randint(0, 9, (100,)) + 0 * x]

    x = torch.zeros(1)
    program = partition(several, [x], ONE)
    inputs = program.local(0, x, seed=3)
    for one, other in zip(
        compile_graph(fx.GraphModule({}, program.graph), inputs)(list(inputs)), program.simulate(x, seed=3)
    ):
        assert torch.equal(one, other)


def test_what_draws_by_a_state_is_refused() -> None:
    generator = torch.Generator()
    for fn, output in (
        (lambda x: torch.rand(4, generator=generator) + x, "`torch.Generator`"),
        (torch.poisson, "cannot be told by their position"),
    ):
        with pytest.raises(ValueError, match=output):
            capture(fn, [torch.rand(4)])
