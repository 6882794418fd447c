"""Vectorized pipelines: one program of stacked layers, which trains as one device does and shifts by permutes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_model import of_small_model
from torch import Tensor, nn
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.models.layer_stacks import layer_stacks
from tpshard.parallelism.pipeline.schedules import check
from tpshard.plan import planner
from tpshard.plan.report import screen
from tpshard.plan.views.page import page
from tpshard.plan.views.pictures import svg
from tpshard.plan.views.stage_lanes import stage_lanes
from tpshard.plan.views.trace import trace
from tpshard.programs.compare.float64 import BOUND, distance
from tpshard.programs.compare.lockstep import Lockstep, StepValues
from tpshard.programs.setting.cluster import devices_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.setting.stacking import Stacking
from tpshard.programs.step import training
from tpshard.programs.step.training_step import TrainingPrograms
from tpshard.recipes.reading.load import loads

RECIPE = of_small_model(
    """
name: vectorized
cluster: {device: cpu}
mesh: {pp: 2}
batch: {global_sequences: 8}
pipeline: {schedule: gpipe, form: vectorized, micro_batches: 2}
compile: eager
""",
    layers=4,
)
CIRCULAR = "pipeline.schedule=circular"


class Block(nn.Module):
    """A user's layer; `numbered` computes with its number, `pair` returns two tensors."""

    def __init__(self, number: int, scale: float, numbered: bool, pair: bool, odd: str) -> None:
        super().__init__()
        self.act = F.gelu if odd != "act" or number % 2 else torch.relu
        self.layer_idx, self.scale, self.numbered, self.pair = number, scale, numbered, pair
        self.norm, self.up, self.down = nn.LayerNorm(10), nn.Linear(10, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor, share: float, *, documents: Tensor | None = None) -> Any:
        if self.numbered:
            x = x * (1 + self.layer_idx)
        assert documents is not None
        alike = (documents[:, :, None] == documents[:, None]).tril()
        x = x + share * torch.softmax((x @ x.mT).masked_fill(~alike, -1e9), -1) @ x
        x = x + self.scale * self.down(self.act(self.up(self.norm(x))))
        return (x, None) if self.pair else x


class Net(nn.Module):
    """A user's model whose layers are in a list of a submodule, called with a number and by keyword."""

    def __init__(
        self, lists: int = 1, apart: bool = False, numbered: bool = False, pair: bool = False, odd: str = ""
    ) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(32, 10), nn.Module(), nn.Linear(10, 32)
        for i in range(lists):
            blocks = [Block(n, 1.0 / (n + 1) if apart else 1.0, numbered, pair, odd) for n in range(4)]
            if odd == "shared":
                blocks[3].up.weight = blocks[0].up.weight
            self.body.add_module(f"blocks{i}", nn.ModuleList(blocks))

    def forward(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for blocks in self.body.children():
            assert isinstance(blocks, nn.ModuleList)
            for block in blocks[: len(blocks)]:
                assert not block.numbered or block.layer_idx is not None
                x = block(x, 0.5, documents=documents)
        return self.head(x)


def module(args: str = "") -> str:
    sizes = "layers: null, width: null, heads: null, kv_heads: null, head_dim: null, mlp: null, vocab: null"
    return f"model={{module: '{__name__}:Net', args: {{{args}}}, seq_len: 6, dtype: fp32, {sizes}}}"


@cache
def setting(*overrides: str) -> Setting:
    recipe = loads(RECIPE, overrides)
    return Setting.of(recipe, devices_of(recipe))


def slowly(*overrides: str) -> object:
    return pytest.param(overrides, marks=pytest.mark.slow)


@cache
def build(*overrides: str) -> TrainingPrograms:
    return training.build(setting(*overrides))


@cache
def step(*overrides: str) -> StepValues:
    return Lockstep(build(*overrides), 32).step()


GPIPE, ROUNDS = ("model.layers=2", "mesh={pp: 2, tp: 2}"), (CIRCULAR,)


@pytest.mark.parametrize(
    "overrides",
    [
        GPIPE,
        ROUNDS,
        (module(), CIRCULAR, "mesh={pp: 2, tp: 2}"),
        slowly(CIRCULAR, "mesh={pp: 2, tp: 2}", "model.tie_embeddings=true"),
        slowly("mesh={pp: 2, fsdp: 2}", "remat=full"),
        slowly(CIRCULAR, "mesh={pp: 2, fsdp: 2}", "remat=full", "pipeline.micro_batches=4"),
        slowly("mesh={pp: 4}", "pipeline.micro_batches=8"),
        slowly("mesh={pp: 2, tp: 2}", "sharding.rules.vocab=tp"),
        slowly("mesh={pp: 2, tp: 2}", "sharding.rules.seq_sp=tp",
               'sharding.annotate={"layers.*.residual": [batch, seq_sp, embed]}'),
    ],
    ids=str,
)  # fmt: skip
def test_loss_and_gradients_are_those_of_one_device(overrides: tuple[str, ...]) -> None:
    model = [o for o in overrides if o.startswith("model")]
    actual, expected = step(*overrides), step("mesh.pp=1", "pipeline=null", *model)
    assert actual.loss == pytest.approx(expected.loss, rel=BOUND)
    assert actual.gradients.keys() == expected.gradients.keys()
    apart = {name: distance(actual.gradients[name], grad) for name, grad in expected.gradients.items()}
    assert max(apart.values()) < BOUND, apart


@pytest.mark.parametrize("overrides", [GPIPE, ROUNDS], ids=str)
def test_the_shift_is_a_permute(overrides: tuple[str, ...]) -> None:
    """Layers go on by permutes of one micro-batch, once a step and back; over stages nothing is ever gathered."""
    stacking, over = setting(*overrides).stacking, [c for c in build(*overrides).micro.collectives if "pp" in c.axes]
    shifts = [c for c in over if c.kind == "permute"]
    assert stacking is not None and len(shifts) == 2 * (stacking.steps - 1)
    assert {c.kind for c in over} <= {"permute", "all_reduce", "reduce_scatter"}
    assert {c.bytes for c in shifts} == {8 // 2 * 8 * 16 * 4}, "rows, positions, columns, bytes"


def test_layers_are_dealt_round_the_stages() -> None:
    once, twice = Stacking(2, 1, 2, 4), Stacking(2, 2, 1, 4)
    assert [once.layers(slot) for slot in range(2)] == [[0, 2], [1, 3]]
    assert [twice.layers(slot) for slot in range(2)] == [[0, 1], [2, 3]], "layer i is on stage i mod 2"
    assert twice.members("layers.1.mlp.up.weight") == ["layers.2.mlp.up.weight", "layers.3.mlp.up.weight"]
    assert twice.members("tok_embed.weight") is None
    passed = [[twice.turn(time, stage) for stage in range(2)] for time in range(twice.steps)]
    assert passed[0] == [(0, 0), None] and passed[-1] == [None, (3, 1)]
    for stage in range(2):
        turns = [turn[stage] for turn in passed if turn[stage] is not None]
        assert sorted(turns) == [(micro, turn) for micro in range(4) for turn in range(2)]


def test_the_plan_shows_bubble_and_stages() -> None:
    planned = planner.planned_training(build(*GPIPE))
    report, drawing = planned.report, planned.drawing
    assert "PIPELINE  gpipe, vectorized, 2 stages of 1 layer, 2 micro-batches in 3 steps: 33.3% bubble" in (
        screen.screen(report)
    )
    actual = report.to_json()["pipeline"]
    assert (actual["form"], actual["bubble"], actual["split"]) == ("vectorized", pytest.approx(1 / 3), [1, 1])
    lanes = stage_lanes(report, drawing)
    assert lanes is not None and len({slot.task for slot in lanes.slots}) == len(lanes.slots) == 2 * 2 * 2
    check(lanes.table)
    for task, start, end in lanes.slots:
        assert 0 <= start < end <= lanes.seconds
        assert all(before.end <= start + 1e-12 for before in lanes.slots if before.task in lanes.table.needs(task))
    assert "device 1 along pp" in trace(report, drawing)
    assert "F1 of stage 1" in svg(report, drawing) and "F1 of stage 1" in page(report, drawing)
    assert " 1 .  F0 F1" in screen.screen(report, verbose=True)
    plain = planner.planned_training(build("mesh.pp=1", "pipeline=null", "model.layers=2")).report
    assert report.job.params == plain.job.params
    assert report.pricing.useful_flops == pytest.approx(plain.pricing.useful_flops, rel=0.02), "masks count too"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["sharding.rules.stage=tp"], "3 `sharding.rules.stage` must be `pp`"),
        (["sharding.rules.stage=null"], "3 `sharding.rules.stage` must be `pp`"),
        (["pipeline.schedule=1f1b"], "3 `pipeline.form: vectorized` does not suit 1f1b"),
        (["pipeline.split=[1, 3]"], "3 `pipeline.split` does not suit `form: vectorized`"),
        (["model.layers=5"], "4 2 stages do not divide the 5 layers of the model; stages of a vectorized pipeline have "
         "equally many layers; mesh.pp: 5; model.layers: 4 or 6; or form: staged"),
        ([CIRCULAR, "pipeline.micro_batches=null", "batch={global_sequences: 9, per_device: 3}"],
         "4 vectorized, circular needs a multiple of its 2 stages as micro-batches, not 3"),
        (["model={preset: tiny-moe}"], "4 `pipeline.form: vectorized` needs layers that differ only in their weights; "
         "this model has experts; form: staged"),
        ([module("lists: 2")], "4 `pipeline.form: vectorized` stacks the layers of one list of equal modules; "
         "this model has `body.blocks0`, `body.blocks1`; form: staged"),
        ([module("apart: true")], "4 `pipeline.form: vectorized` needs layers that differ only in their weights; "
         "`scale` is 1.0 in layer 0 and 0.5 in layer 1"),
        ([module("odd: act")], "4 `pipeline.form: vectorized` needs layers that differ only in their weights; "
         "`act` is <built-in method relu"),
        ([module("odd: shared")], "4 `pipeline.form: vectorized` needs layers that differ only in their weights; "
         "`body.blocks0.0.up.weight` is shared with another part of the model"),
        ([module().replace("seq_len: 6", "seq_len: 8")], "3 `Net` cannot be traced into one static graph; "
         "`x = block(x, 0.5, documents=documents)` in "),
        ([module("numbered: true")], "3 `Net` cannot be traced into one static graph; "
         "`x = x * (1 + self.layer_idx)` in "),
        ([module("pair: true")], "3 `Net` cannot be traced into one static graph; "
         "`x = block(x, 0.5, documents=documents)` in "),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_would(overrides: list[str], text: str) -> None:
    with pytest.raises(Mistakes) as caught:
        training.build(setting(*overrides))
    (one, *_) = caught.value.diagnostics
    assert f"{int(one.exit)} {one.message}; {one.why}; {one.fix}".startswith(text)


def test_layers_with_buffers_may_differ() -> None:
    net = Net()
    (stack,) = layer_stacks(net)
    assert (stack.path, stack.kinds, stack.differs) == ("body.blocks0", (0, 0, 0, 0), "")
    net.body.blocks0[2].register_buffer("slope", torch.ones(1))  # type: ignore[union-attr, index]
    (stack,) = layer_stacks(net)
    assert (stack.kinds, stack.differs) == ((0, 0, 1, 0), "`slope` is unset in layer 0 and tensor([1.]) in layer 2")
    for layer in net.body.blocks0:  # type: ignore[union-attr]
        layer.register_buffer("slope", torch.ones(1))
    (stack,) = layer_stacks(net)
    assert (stack.kinds, stack.differs) == ((0, 0, 0, 0), "")
