"""Tokens travel to experts by all-to-all with nothing dropped: equal to the gather, with fewer bytes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.kernels.experts.experts import experts
from tpshard.models.families.dispatch import ExpertGroups, by_groups
from tpshard.models.families.routing import Routes
from tpshard.parallelism import Mesh, partition
from tpshard.parallelism.pricing.timeline import price
from tpshard.parallelism.program import Program, info
from tpshard.programs.compare.float64 import BOUND, distance
from tpshard.programs.compare.lockstep import Lockstep, StepValues
from tpshard.programs.setting.cluster import device_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads

SIZES = ((8, 16, 8), (8, 16, 16), (16, 12, 8), (16, 12, 8), (16, 8, 12))
"""Tokens; scores of 16 experts; gate, up and down."""


def routed(scores: Tensor) -> Routes:
    ids = scores.detach().topk(3, -1).indices
    chosen = (ids.unsqueeze(-1) == torch.arange(scores.shape[-1])).to(scores.dtype)
    return Routes(ids, (chosen * scores.unsqueeze(-2)).sum(-1), chosen, scores)


def with_gradients(groups: ExpertGroups | None, x: Tensor, scores: Tensor, *matrices: Tensor) -> list[Tensor]:
    """The number of choices without a slot, the results and the gradients of all inputs."""
    routes, missed = routed(scores), torch.zeros(())
    if groups is None:
        y = experts(x, routes.ids, routes.weights, *matrices)  # type: ignore[misc]
    else:
        y, missed = by_groups(x, routes, matrices, groups)
    loss = (y * torch.arange(y.numel(), dtype=y.dtype).sin().view(y.shape)).sum()
    return [missed.detach(), y, *torch.autograd.grad(loss, [x, scores, *matrices])]


def inputs(uneven: float) -> list[Tensor]:
    """uneven: by how much the scores of the first group's experts are raised."""
    generator = torch.Generator().manual_seed(0)
    x, scores, *matrices = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in SIZES)
    scores = scores.sigmoid() + uneven * (torch.arange(16) < 4)
    return [one.requires_grad_() for one in (x, scores, *matrices)]


@cache
def by_slots(slack: float, mesh: tuple[tuple[str, int], ...] = (("dp", 2), ("ep", 4))) -> Program:
    """Groups of four experts, one on each device along ep."""
    sharded = [(("dp", "ep"),)] * 2 + [("ep",)] * 3
    return partition(lambda *args: with_gradients(ExpertGroups(4, slack), *args), inputs(0), Mesh(dict(mesh)), sharded)


@pytest.mark.parametrize(
    ("slack", "uneven", "missed"), [(2.0, 0, False), (1.0, 0, True), (1.0, 3, True), (9.0, 3, False)]
)
def test_results_and_gradients_are_those_of_the_gather_however_tokens_are_routed(
    slack: float, uneven: float, missed: bool
) -> None:
    args = inputs(uneven)
    count, *actual = by_slots(slack).simulate(*args)
    assert bool(count > 0) == missed
    for mine, whole in zip(actual, with_gradients(None, *args)[1:], strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-10)


# ---- recipes ------------------------------------------------------------------------------------------------------
RECIPE = """
name: mixture
cluster: {device: h100-sxm-80g, nodes: 1, devices_per_node: 8}
mesh: {ep: 8}
model: {preset: tiny-moe, experts: 16, top_k: 2, layers: 1, width: 64, heads: 4, kv_heads: 4, head_dim: 16, mlp: 32,
        vocab: 64, seq_len: 4096, dtype: fp32}
batch: {global_sequences: 8}
compile: blocks
"""


def setting(*overrides: str) -> Setting:
    return Setting.of(loads(RECIPE, overrides))


def sent_to_experts(*overrides: str) -> int:
    """Bytes of activations that a device receives over ep in a step with even routing."""
    built = training.build(setting(*overrides))
    device, _, per_host = device_of(built.setting.recipe)
    priced = price(built.stages[0].forward, device, per_host, compiled="none")
    bodies = [priced, *(body for body, _, _ in priced.bodies)]
    costs: list[Any] = [(body.kernels[i].node, cost) for body in bodies for i, cost in body.costs.items()]
    comms = [(info(node).comm, cost) for node, cost in costs]
    return sum(cost.wire_bytes for comm, cost in comms if comm.axes == ("ep",) and comm.of == "activation")


def test_only_the_fallback_gathers_tokens() -> None:
    """A sequence of 4,096 tokens has 1.5 * 4096 * (1 - (14 C 2) / (16 C 2)) slots on each device, which are 1,485."""
    program = training.build(setting()).stages[0].forward
    moved = [c for _, c in program.issues() if c.axes == ("ep",) and c.of == "activation"]
    assert {c.kind for c in moved} == {"all_to_all", "all_reduce"} and all(c.requested for c in moved)
    assert max(c.bytes for c in moved if c.kind == "all_reduce") == 64  # the router's bias
    assert max(c.bytes for c in moved) == 8 * 1485 * 64 * 4
    rare = [body for node in program.nodes for body in node.args if isinstance(body, Program)]
    assert {c.kind for body in rare for c in body.collectives} == {"all_gather", "reduce_scatter"}


def test_an_even_step_sends_at_most_six_tenths_of_the_gathers_bytes() -> None:
    gather, exchange = (sent_to_experts(f"sharding.dropless.form={form}") for form in ("gather", "all_to_all"))
    assert 0 < exchange <= 0.6 * gather


@pytest.mark.parametrize(
    ("overrides", "form"),
    [
        ((), "by all-to-all: "),
        (("compile=auto",), "gathered: `compile: auto` compiles no program"),
        (("compile=inductor",), "gathered: `compile: inductor` compiles"),
        (("sharding.dropless.form=gather",), "gathered: `sharding.dropless.form`"),
        (("mesh={dp: 4, ep: 2}",), "gathered: 0."),
        (
            ("mesh={ep: 4, tp: 2}", "sharding.rules={batch: ep, expert: tp, heads: tp}"),
            "gathered: the axes of `sharding.rules.expert`",
        ),
    ],
)
def test_a_plan_says_the_form_and_why(overrides: tuple[str, ...], form: str) -> None:
    made = setting(*overrides)
    assert made.dropless is not None and made.dropless.words.startswith(form)
    assert (made.expert_groups is None) == form.startswith("gathered")


def test_an_all_to_all_that_experts_cannot_have_is_refused() -> None:
    with pytest.raises(Mistakes, match="cannot be had") as error:
        setting("mesh={ep: 8}", "model.experts=12", "sharding.dropless.form=all_to_all").model  # noqa: B018
    assert error.value.exit == Exit.FIT


SMALL = """
name: mixture
cluster: {device: cpu}
model: {preset: tiny-moe, experts: 8, top_k: 3, layers: 2, width: 16, heads: 4, kv_heads: 2, head_dim: 4, mlp: 8,
        vocab: 32, seq_len: 8, dtype: fp32, balance: loss, balance_rate: 0.1}
batch: {global_sequences: 8, per_device: 1}
sharding: {dropless: {form: all_to_all, slack: SLACK}}
mesh: MESH
"""


@cache
def step_of(mesh: str, slack: str, *overrides: str) -> tuple[StepValues, list[Tensor]]:
    programs = training.build(Setting.of(loads(SMALL.replace("SLACK", slack).replace("MESH", mesh), overrides)))
    run = Lockstep(programs, 32)
    return run.step(), [parts[0] for parts in run.counted]


@pytest.mark.parametrize(
    ("mesh", "slack", "overrides"),
    [
        ("{fsdp: 2, ep: 2}", "0.6", ("remat=full",)),
        ("{ep: 2, tp: 2}", "0.6", ()),
        ("{pp: 2, ep: 4}", "1", ("pipeline={schedule: 1f1b}",)),
    ],
)
def test_steps_are_those_of_one_device_though_slots_are_few(mesh: str, slack: str, overrides: tuple[str, ...]) -> None:
    (actual, counted), (expected, _) = step_of(mesh, slack, *overrides), step_of("{}", "1")
    assert actual.loss == pytest.approx(expected.loss, rel=BOUND)
    assert all(distance(actual.gradients[name], grad) <= BOUND for name, grad in expected.gradients.items())
    assert sum(one[-1] for one in counted) > 0  # of the last layer's choices some found no slot
