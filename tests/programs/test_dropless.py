"""Tokens travel to experts by all-to-all with nothing dropped: equal to the gather, with fewer bytes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.kernels.experts.experts import experts
from tpshard.models.families.dispatch import ExpertGroups, by_groups
from tpshard.models.families.routing import Routes
from tpshard.parallelism import Mesh, partition
from tpshard.parallelism.node_info import programs_in
from tpshard.parallelism.program import Program
from tpshard.programs.compare.float64 import BOUND, distance
from tpshard.programs.compare.lockstep import Lockstep, StepValues
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads

from dropless_bytes import sent_to_experts, setting

SIZES = ((16, 8, 8), (16, 8, 16), (16, 12, 8), (16, 12, 8), (16, 8, 12))
"""Tokens, of two sequences on each of eight devices; scores of 16 experts; gate, up and down."""


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
def by_slots(slack: float, shards: int, spread: float) -> Program:
    """Groups of four experts, one on each device along ep."""
    sharded, groups = [(("dp", "ep"),)] * 2 + [("ep",)] * 3, ExpertGroups(4, slack, shards, spread)
    return partition(lambda *args: with_gradients(groups, *args), inputs(0), Mesh({"dp": 2, "ep": 4}), sharded)


@pytest.mark.parametrize(
    ("slack", "shards", "spread", "uneven", "missed"),
    [
        (1.5, 8, 1.6, 0, 0),  # 13 slots in every step, and one more if the load is 14
        (1.5, 8, 1.6, 0.1, 0),  # two more: 15
        (1.5, 8, 1.6, 3, 1),  # 16
        (1.0, 16, 0, 0, 1),  # slots of their own for each sequence
    ],
)
def test_results_and_gradients_are_those_of_the_gather_however_tokens_are_routed(
    slack: float, shards: int, spread: float, uneven: float, missed: int
) -> None:
    args = inputs(uneven)
    count, *actual = by_slots(slack, shards, spread).simulate(*args)
    assert bool(count > 0) == missed
    for mine, whole in zip(actual, with_gradients(None, *args)[1:], strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-10)


# ---- recipes ------------------------------------------------------------------------------------------------------
def test_slots_travel_as_the_load_needs_and_only_the_fallback_gathers_tokens() -> None:
    """Even routing sends a share p = 1 - (14 C 2) / (16 C 2) of 4,096 tokens to each device, which are 990.

    Four deviations sqrt(4096 * p * (1 - p)) more are 1,100, half of them more 1,485.
    """
    program = training.build(setting("sharding.dropless.form=all_to_all")).stages[0].forward
    moved = [c for _, c in program.issues() if c.axes == ("ep",) and c.of == "activation"]
    assert {c.kind for c in moved} == {"all_to_all", "all_reduce"} and all(c.requested for c in moved)
    assert max(c.bytes for c in moved if c.kind == "all_reduce") == 64  # the router's bias
    inside = [program]
    for slots in (1100, 192, 193):
        sent = [c.bytes for one in inside for _, c in one.issues() if c.kind == "all_to_all"]
        assert max(sent) == 8 * slots * 64 * 4
        inside = [body for outer in inside for node in outer.nodes for body in programs_in(node)]
    assert {c.kind for body in inside for c in body.collectives} == {"all_gather", "reduce_scatter"}


def test_an_even_step_with_four_experts_a_token_sends_at_most_half_of_the_gathers_bytes() -> None:
    """The figures of the pages are those of wider tokens: `benchmarks/dropless_bytes.py`."""
    forms = (f"sharding.dropless.form={form}" for form in ("gather", "all_to_all"))
    gather, exchange = (sent_to_experts(form, "model.top_k=4") for form in forms)
    assert 0 < exchange <= 0.5 * gather


@pytest.mark.parametrize(
    ("overrides", "form"),
    [
        (("model.width=512",), "by all-to-all: "),
        ((), "gathered: 0."),  # a GPU's host waits for four conditions a layer
        (("mesh={dp: 4, ep: 2}", "cluster.device=cpu"), "gathered: "),  # 0.84 of the time is too little a gain
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
model: {preset: tiny-moe, experts: 8, top_k: 2, layers: LAYERS, width: 16, heads: 4, kv_heads: 2, head_dim: 4, mlp: 8,
        vocab: 4, seq_len: 32, dtype: fp32, balance: loss, balance_rate: 0.1}
batch: {global_sequences: 8, per_device: 1}
sharding: {dropless: {form: all_to_all, slack: 1.85}}
mesh: MESH
"""


@cache
def step_of(layers: int, mesh: str, *overrides: str) -> tuple[StepValues, list[Tensor]]:
    text = SMALL.replace("LAYERS", str(layers)).replace("MESH", mesh)
    run = Lockstep(training.build(Setting.of(loads(text, overrides))), 4)
    return run.step(), [parts[0] for parts in run.counted]


@pytest.mark.parametrize(
    ("layers", "mesh", "overrides"),
    [
        (1, "{fsdp: 2, ep: 4}", ("remat=full",)),
        (1, "{ep: 4, tp: 2}", ("batch.per_device=2",)),
        (2, "{pp: 2, ep: 4}", ("pipeline={schedule: 1f1b}",)),
    ],
)
def test_steps_are_those_of_one_device_though_slots_are_few(layers: int, mesh: str, overrides: tuple[str, ...]) -> None:
    """Of the 32 tokens of a sequence 27 have slots on each device in every step, and one more if it is needed."""
    (actual, counted), (expected, _) = step_of(layers, mesh, *overrides), step_of(layers, "{}")
    assert actual.loss == pytest.approx(expected.loss, rel=BOUND)
    assert all(distance(actual.gradients[name], grad) <= BOUND for name, grad in expected.gradients.items())
    assert sum(one[8::9].sum() for one in counted) > 0  # of layers' choices, beside the loads of 8 experts
