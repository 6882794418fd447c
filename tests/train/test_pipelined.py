"""Pipeline stages on real processes equal one plain model on every schedule."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tpshard.models.objectives.loss import cross_entropy_sum
from tpshard.parallelism.runtime.context import Context
from tpshard.plan import planner
from tpshard.programs.compare.float64 import BOUND, float64
from tpshard.programs.step import training
from tpshard.train.run.training_engine import TrainingEngine
from training_cases import SEED, assert_trained, global_batch, reference, setting_of, spec_of, train

FOUR = "model.layers=4"
TIED = "model.tie_embeddings=true"


def steps(context: Context, overrides: list[str]) -> dict[str, Any]:
    """Trains a few steps in float64; the record, and the whole state at the end."""
    with float64():
        return train(context, training.build(setting_of(dict(context.mesh.axes), *overrides)))


def slowly(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


CASES = [
    slowly({"pp": 2}, "{schedule: gpipe}", [FOUR]),
    slowly({"pp": 2}, "{schedule: circular}", [FOUR, TIED]),
    slowly({"pp": 2, "fsdp": 2}, "{schedule: circular, form: vectorized}", [FOUR, TIED, "batch.per_device=3"]),
    slowly({"pp": 2}, "{schedule: interleaved_1f1b}", [FOUR, TIED]),
    slowly({"pp": 4}, "{schedule: 1f1b}", [FOUR, TIED]),
    slowly({"pp": 4}, "{schedule: zero_bubble}", [FOUR]),
    slowly({"pp": 2, "fsdp": 2}, "{schedule: 1f1b, split: [1, 3]}", [FOUR, TIED]),
    slowly({"pp": 2, "fsdp": 2}, "{schedule: interleaved_1f1b}",
           ["fsdp.accumulate={gather: step, reduce: last}", FOUR, TIED, "batch.per_device=1"]),
    ({"pp": 2, "tp": 2}, "{schedule: zero_bubble}", ["remat=full"]),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "pipeline", "overrides"), CASES)
def test_three_steps_equal_the_plain_model(
    pool: Any, mesh: dict[str, int], pipeline: str, overrides: list[str]
) -> None:
    shape = [o for o in overrides if o.startswith("model.")]
    axes = {"pp": 1, "dp": 1, "fsdp": 1, "tp": 1} | mesh
    inputs = [f"pipeline={pipeline}", *overrides]
    plan = setting_of(axes, *inputs).batch
    for actual in pool.run(steps, inputs, world=math.prod(mesh.values()), mesh=axes):
        assert_trained(actual, reference(3, *shape))
        assert actual["expected"] == actual["state"].keys(), "a checkpoint on any mesh has them all"
        assert actual["eval"] == evaluate(actual["state"], shape, plan.per_device * plan.data_ranks)


def count(context: Context, overrides: list[str]) -> tuple[int, int, int]:
    """(collectives, bytes sent, peak bytes) of a step of this rank, as a run logs them.

    The peak is the least of three runs: on a busy machine a value that was sent is freed later.
    """
    programs = training.build(setting_of(dict(context.mesh.axes), *overrides))
    counted = [counted_step(context, programs) for _ in range(3)]
    collectives, sent_bytes, peaks = zip(*counted, strict=True)
    assert len(set(collectives)) == len(set(sent_bytes)) == 1
    return collectives[0], sent_bytes[0], min(peaks)


def counted_step(context: Context, programs: Any) -> tuple[int, int, int]:
    engine = TrainingEngine(programs, context, spec_of(programs.setting).initial_block)
    engine.initialize(SEED)
    plan = programs.setting.batch
    for step in range(3):
        rows = plan.rows(engine.data_rank)
        mine = global_batch(step).rows(rows.start, rows.stop)
        for i in range(plan.micro_batches):
            engine.accumulate(mine.rows(i * plan.per_device, (i + 1) * plan.per_device), seed=step)
        engine.update(0.01, step + 1)
    return engine.collectives, engine.sent_bytes, engine.peak_bytes


@pytest.mark.parametrize(
    ("schedule", "layers"), [slowly("gpipe", FOUR), slowly("interleaved_1f1b", FOUR), ("zero_bubble", "model.layers=2")]
)
def test_a_plan_counts_what_every_stage_sends_and_holds(pool: Any, schedule: str, layers: str) -> None:
    axes = {"pp": 2, "dp": 1, "fsdp": 2, "tp": 1}
    inputs = [layers, f"pipeline={{schedule: {schedule}}}", "batch.per_device=1", "cluster={device: cpu}"]
    piped = planner.price_training(training.build(setting_of(axes, *inputs))).pipeline
    assert piped is not None
    for rank, (collectives, sent_bytes, peak_bytes) in enumerate(pool.run(count, inputs, world=4, mesh=axes)):
        planned = piped.devices[rank // 2]
        assert (collectives, sent_bytes) == (planned.collectives, planned.sent_bytes)
        assert peak_bytes == pytest.approx(planned.peak_bytes, rel=0.05)


def evaluate(state: dict[str, torch.Tensor], shape: list[str], rows: int) -> Any:
    """Loss and number of tokens of the first rows of a batch, by the plain model with these weights."""
    with float64():
        model = spec_of(setting_of({}, *shape)).build(device="cpu", seed=SEED)
        params = {n: state[n] for n, _ in model.named_parameters()}
        batch = global_batch(9).rows(0, rows)
        logits = torch.func.functional_call(model, params, (batch["tokens"], batch["documents"], batch["positions"]))
        loss, count = cross_entropy_sum(logits, batch["targets"])
    return pytest.approx((float(loss), int(count)), rel=BOUND)
