"""Recipes with a pipeline: the derived schedule and split, refusals with a fix, and what runs once per step."""

from __future__ import annotations

from functools import cache

import architectures
import pytest
import torch
from small_model import of_small_model
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.plan import planner
from tpshard.programs.compare.float64 import BOUND, distance
from tpshard.programs.compare.lockstep import Lockstep, StepValues
from tpshard.programs.parts.memo import Memo
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.programs.step.splitting import layers_of
from tpshard.programs.step.staged import table_of
from tpshard.programs.step.training_step import TrainingPrograms
from tpshard.recipes.reading.load import loads

RECIPE = of_small_model(
    """
name: staged
cluster: {device: cpu}
mesh: {pp: 4}
batch: {global_sequences: 32}
pipeline: {schedule: 1f1b}
""",
    layers=4,
)
MEMO = Memo()
"""What settings share that differ in their pipeline alone."""


def setting(*overrides: str) -> Setting:
    return Setting.of(loads(RECIPE, overrides))


def refusal(*overrides: str) -> str:
    """The error of a recipe that cannot be built, with its exit code."""
    with pytest.raises(Mistakes) as caught:
        training.build(setting(*overrides), memo=MEMO)
    one = next(one for one in caught.value.diagnostics if one.severity == "error")
    return f"{int(one.exit)} {one.message}; {one.why}; {one.fix}"


def test_stages_rounds_and_micro_batches_are_derived() -> None:
    settings = setting()
    assert settings.recipe.pipeline is not None
    assert settings.recipe.pipeline.stages_per_device == 1 and table_of(settings).stages == 4
    assert (settings.batch.micro_batches, settings.batch.per_device) == (16, 2), (
        "four for each stage, as large as can be"
    )
    assert setting("batch.per_device=1").batch.micro_batches == 32
    assert setting("pipeline.micro_batches=8").batch.per_device == 4
    assert setting("mesh={pp: 2, fsdp: 2}", "pipeline.micro_batches=8").batch.per_device == 2
    interleaved = setting("mesh={pp: 2}", "pipeline={schedule: interleaved_1f1b}")
    assert (table_of(interleaved).stages, table_of(interleaved).rounds) == (4, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mesh.pp=1"], "3 `pipeline` needs a mesh axis `pp` for its stages; the mesh has pp 1, dp 1, fsdp 1, "),
        (
            ["pipeline=null"],
            "3 nothing uses the mesh axis `pp`; its devices would all compute the same; add pipeline: ",
        ),
        (["pipeline.stages=2"], "3 `pipeline.stages: 2` must be the size of `mesh.pp`"),
        (["pipeline.rounds=2"], "3 `pipeline.rounds: 2` does not suit 1f1b, whose devices have one stage each"),
        (["sharding.rules.mlp=pp"], "3 `sharding.rules.mlp` shards over `pp`, the axis of the pipeline's stages"),
        (["fsdp.axis=pp"], "3 `fsdp.axis` shards over `pp`"),
        (
            ["sharding.rules.stage=pp", "sharding.annotate.norm.weight=[stage]"],
            "3 `sharding.annotate.norm.weight` names the dim `stage`, which only stacked layers have",
        ),
        (["pipeline.split=[1, 2, 1, 1]"], "4 `pipeline.split` has 5 layers in 4 stages; the model has 4 layers"),
        (["pipeline.split=[2, 2]"], "4 `pipeline.split` has 4 layers in 2 stages; the model has 4 layers for 4 stages"),
        (["model.layers=1"], "4 a pipeline needs several layers, and this model has one"),
        (["model.layers=3"], "4 4 stages are more than the 3 layers of the model; every stage has at least one layer"),
        (["pipeline.micro_batches=2"], "4 1f1b on 4 stages needs at least 4 micro-batches, not 2; 32 sequences"),
        (["pipeline.micro_batches=5"], "4 `pipeline.micro_batches: 5` do not divide the 32 sequences of a data rank"),
        (["pipeline.micro_batches=8", "batch.per_device=2"], "4 `pipeline.micro_batches: 8` of `batch.per_device: 2`"),
        (
            ["pipeline={schedule: interleaved_1f1b, micro_batches: 3}", "batch.global_sequences=12", "mesh={pp: 2}"],
            "4 interleaved_1f1b needs a multiple of its 2 stages as micro-batches, not 3",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(overrides: list[str], message: str) -> None:
    assert refusal(*overrides).startswith(message)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(Mistakes) as caught:
        layers_of(setting(), 0, 4)
    (one,) = caught.value.diagnostics
    assert one.exit == Exit.FIT and "repeated layers" in one.message and "nn.ModuleList" in one.fix


def test_an_uneven_split_is_given_by_hand() -> None:
    programs = build("pipeline.split=[1, 2, 2, 1]", "model.layers=6")
    assert programs.pipeline is not None
    assert [stage.blocks for stage in programs.pipeline.stages] == [
        ("layers.0",), ("layers.1", "layers.2"), ("layers.3", "layers.4"), ("layers.5",)]  # fmt: skip


def test_by_default_no_split_has_a_faster_slowest_device() -> None:
    """The prices include the head and the loss of a large vocabulary."""
    large = ("mesh.pp=2", "model.layers=5", "model.vocab=256", "pipeline.micro_batches=4")

    def busy(*overrides: str) -> tuple[list[int], float]:
        actual = planner.price_training(build(*large, *overrides)).pipeline
        assert actual is not None
        return [stage.layers for stage in actual.stages], max(device.busy_s for device in actual.devices)

    split, seconds = busy()
    assert split[0] > split[1]
    assert all(seconds <= busy(f"pipeline.split=[{n}, {5 - n}]")[1] for n in range(1, 5))


@cache
def build(*overrides: str) -> TrainingPrograms:
    return training.build(setting(*overrides), memo=MEMO)


def test_every_parameter_lies_on_one_device_but_for_tied_ones() -> None:
    plain, tied = build().pipeline, build("model.tie_embeddings=true").pipeline
    assert plain is not None and tied is not None
    held = [name for device in plain.devices for name in device.names]
    assert len(held) == len(set(held)) and set(held) == set(build().names)
    assert [device.exchange is None for device in plain.devices] == [True] * 4
    assert [device.exchange is None for device in tied.devices] == [False, True, True, False]
    assert [c.kind for c in tied.devices[0].exchange.collectives] == ["send", "recv"]  # type: ignore[union-attr]


def test_devices_agree_on_the_norm_by_one_sum() -> None:
    """Once per step only loss, tokens and the squared norm are summed over the stages."""
    pipeline = build().pipeline
    assert pipeline is not None
    for device in pipeline.devices:
        over = [(c.kind, c.bytes) for p in (device.totals, device.update) for c in p.collectives if c.axes == ("pp",)]
        assert over == [("all_reduce", 16 * 8), ("all_reduce", 16 * 4), ("all_reduce", 4)]


def test_all_ranks_compare_every_program_and_the_schedule() -> None:
    programs = build()
    assert programs.pipeline is not None
    assert {"schedule", "program of forward of stage 3", "program of backward of stage 0", "program of share"} <= set(
        programs.fingerprints
    )
    assert programs.fingerprints.keys() - {"schedule", "layouts of what is stored"} == {
        f"program of {what}" for what in programs.pipeline.programs
    }


@pytest.mark.parametrize(
    "overrides", [("model.capacity=1.0", "pipeline.schedule=1f1b"), ("pipeline.schedule=zero_bubble",)]
)
def test_experts_in_stages_count_their_tokens_as_on_one_device(overrides: tuple[str, ...]) -> None:
    sizes = ("model={preset: tiny-moe, layers: 2, width: 16, heads: 4, kv_heads: 2, head_dim: 4, mlp: 24, vocab: 32, "
             "seq_len: 8, experts: 4, top_k: 2, balance: loss}")  # fmt: skip
    batch = "batch={global_sequences: 4, per_device: 2}"
    one = Lockstep(training.build(setting(sizes, batch, "mesh={pp: 1}", "pipeline=null", *overrides[:-1])), 32)
    two = Lockstep(training.build(setting(sizes, batch, "mesh={pp: 2}", *overrides)), 32)
    actual, expected = two.step(), one.step()
    assert actual.loss == pytest.approx(expected.loss, rel=BOUND)
    assert all(distance(actual.gradients[name], grad) <= BOUND for name, grad in expected.gradients.items())
    assert torch.equal(sum(parts[0] for parts in two.counted), sum(parts[0] for parts in one.counted))


@pytest.fixture(scope="module")
def without_gradients(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, StepValues]:
    """A recipe for two stages, and its step on one device."""
    folder = architectures.folder(tmp_path_factory.mktemp("folders"), "deepseek_v32")
    recipe = f"""
cluster: {{device: cpu}}
mesh: {{pp: 2}}
model: {{transformers: {folder}, seq_len: 8, dtype: fp32}}
batch: {{global_sequences: 4, per_device: 2}}
pipeline: {{schedule: 1f1b}}
"""
    return recipe, Lockstep(training.build(Setting.of(loads(recipe, ["mesh.pp=1", "pipeline=null"]))), 32).step()


@pytest.mark.parametrize(
    "overrides", [(), ("fsdp.accumulate.reduce=last",), ("pipeline.schedule=zero_bubble",)], ids=str
)
def test_parameters_without_a_gradient_lie_in_stages(
    overrides: tuple[str, ...], without_gradients: tuple[str, StepValues]
) -> None:
    """An indexer's matrices and a router's bias are in no backward pass: their gradients are zero, as on one device."""
    recipe, one = without_gradients
    two = Lockstep(training.build(Setting.of(loads(recipe, overrides))), 32).step()
    assert two.loss == pytest.approx(one.loss, rel=BOUND)
    assert all(distance(two.gradients[name], grad) <= BOUND for name, grad in one.gradients.items())
    without = {name for name, grad in two.gradients.items() if not grad.any()}
    assert {name for name in two.gradients if ".indexer." in name or name.endswith("correction_bias")} <= without
