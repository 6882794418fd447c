"""AdamW equals torch's, and leaves everything unchanged if a gradient is not finite."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from tpshard.models.optimizers.adamw import AdamW, Treatment, Updated, adamw_update, treatments
from tpshard.programs.compare.float64 import BOUND, distance, float64

SHAPES = {"a": (4, 6), "norm": (6,), "b": (3, 5, 2)}


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES.values()]


def step(
    state: tuple[list[torch.Tensor], ...], grads: list[torch.Tensor], number: int, config: AdamW, lr: float, loss: float
) -> Updated:
    with float64():
        return adamw_update(
            *state[:1], grads, *state[1:], torch.tensor(loss), torch.tensor(7), torch.tensor(lr),
            torch.tensor(float(number)), treated=list(treatments(SHAPES, {}).values()), config=config,
        )  # fmt: skip


@pytest.mark.parametrize("clip", [None, 0.5])
def test_it_is_torchs_adamw_with_decay_groups_and_clipping(clip: float | None) -> None:
    config = AdamW(betas=(0.9, 0.95), eps=1e-5, weight_decay=0.3, clip_grad_norm=clip)
    start = tensors(0)
    reference = [torch.nn.Parameter(p.clone()) for p in start]
    groups = [
        {"params": [p for p in reference if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in reference if p.dim() < 2], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-5)
    state = (start, [torch.zeros_like(p) for p in start], [torch.zeros_like(p) for p in start])
    for number in range(1, 6):
        summed = tensors(number)
        for p, g in zip(reference, summed):
            p.grad = g / 7
        norm = torch.nn.utils.clip_grad_norm_(reference, clip if clip is not None else float("inf"))
        for group in theirs.param_groups:
            group["lr"] = 0.1 / number
        theirs.step()
        logits = step(state, summed, number, config, 0.1 / number, 1.0)
        assert logits.finite and float(logits.grad_norm) == pytest.approx(float(norm), rel=BOUND)
        state = (logits.params, logits.exp_avg, logits.exp_avg_sq)
    for mine, other in zip(state[0], reference):
        assert distance(mine, other.detach()) <= BOUND


@pytest.mark.parametrize("fault", ["gradient", "loss"])
def test_what_is_not_finite_changes_nothing(fault: str) -> None:
    state = (tensors(0), tensors(1), [t.abs() for t in tensors(2)])
    grads = tensors(3)
    if fault == "gradient":
        grads[1][2] = float("inf")
    logits = step(state, grads, 3, AdamW(), 0.1, float("nan") if fault == "loss" else 1.0)
    assert not logits.finite
    for old, new in zip(state, (logits.params, logits.exp_avg, logits.exp_avg_sq)):
        assert all(torch.equal(a, b) for a, b in zip(old, new))


def test_it_traces_to_one_graph_without_writing_in_place() -> None:
    state = (tensors(0), tensors(1), [t.abs() for t in tensors(2)])

    def update(p: list, g: list, m: list, v: list) -> Updated:
        return step((p, m, v), g, 2, AdamW(), 0.1, 1.0)

    arguments = (state[0], tensors(3), state[1], state[2])
    graph = make_fx(update)(*arguments)
    names = {
        node.target.name() for node in graph.graph.nodes if node.op == "call_function" and hasattr(node.target, "name")
    }
    assert not [name for name in names if name.partition(".")[0].endswith("_")], names
    for mine, traced in zip(update(*arguments).params, graph(*arguments).params):
        assert torch.equal(mine, traced)


def test_vectors_are_not_decayed() -> None:
    actual = treatments(SHAPES, {"norm": 0.5})
    assert actual == {"a": Treatment(decay=True), "norm": Treatment(balance=0.5), "b": Treatment(decay=True)}


@pytest.mark.parametrize("finite", [True, False])
def test_biases_of_experts_go_from_the_busy_to_the_idle(finite: bool) -> None:
    """One step each, whatever the distance; they are no part of the norm, and nothing of what others do is theirs."""
    start, grads = tensors(0), tensors(1)
    loads = [torch.tensor([5.0, 1.0, 3.0, 2.0, 4.0, 3.0]), torch.tensor([0.0, 9.0])]
    biases = [torch.arange(6) / 10, torch.zeros(2)]
    config, treated = AdamW(), [*treatments(SHAPES, {}).values(), Treatment(balance=0.01), Treatment(balance=0.02)]

    def make(params: list[torch.Tensor], grads: list[torch.Tensor], treated: list[Treatment]) -> Updated:
        zeros = [torch.zeros_like(p) for p in params]
        scalars = (torch.tensor(1.0 if finite else float("nan")), torch.tensor(7), torch.tensor(0.1), torch.tensor(1.0))
        return adamw_update(params, grads, zeros, zeros, *scalars, treated=treated, config=config)

    actual, without = make([*start, *biases], [*grads, *loads], treated), make(start, grads, treated[:3])
    assert torch.equal(actual.grad_norm, without.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(actual.params, without.params))
    assert not any(moment.any() for moment in (*actual.exp_avg[3:], *actual.exp_avg_sq[3:]))
    steps = [new - old for new, old in zip(actual.params[3:], biases)]
    expected = [torch.tensor([-0.01, 0.01, 0, 0.01, -0.01, 0]), torch.tensor([0.02, -0.02])]
    for moved, step in zip(steps, expected):
        torch.testing.assert_close(moved, step * finite)
