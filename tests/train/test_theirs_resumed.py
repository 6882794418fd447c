"""A stopped run of a transformers model continues on another mesh with the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import architectures
import pytest
from tpshard.models import Blueprint
from tpshard.parallelism.float64 import BOUND, distance, float64
from tpshard.parallelism.runtime.context import Context
from tpshard.programs import training
from tpshard.programs.setting import Setting
from tpshard.recipes.load import loads
from tpshard.train.checkpoint import save
from tpshard.train.restore import open_checkpoint
from tpshard.train.training_worker import engine_of
from training_cases import SEED, global_batch, whole

RECIPE = """
name: theirs
cluster: {{device: cpu}}
mesh: {mesh}
model: {{transformers: {folder}, seq_len: 12, dtype: fp32}}
batch: {{global_sequences: 12, per_device: 2}}
compile: eager
"""


def leg(context: Context, folder: str, steps: range, source: str | None, out: str | None) -> dict[str, Any]:
    """Trains some steps from the start or a checkpoint; returns losses and the whole final state."""
    with float64():
        setting = Setting.of(loads(RECIPE.format(mesh=dict(context.mesh.axes), folder=folder)))
        engine = engine_of(training.build(setting), context, Blueprint.of(transformers=folder).initial_block)
        if source is None:
            engine.initialize(SEED)
        else:
            engine.load(open_checkpoint(Path(source)).block)
        plan, losses = setting.batch, []
        for step in steps:
            rows = plan.rows(engine.data_rank)
            mine = global_batch(step).rows(rows.start, rows.stop)
            for i in range(plan.micro_batches):
                engine.accumulate(mine.rows(i * plan.per_device, (i + 1) * plan.per_device), seed=step)
            losses.append(engine.update(0.01, step + 1).loss)
        if out is not None:
            how: Any = {"rank": context.rank, "world": context.world, "barrier": context.barrier}
            save(Path(out), steps.stop, engine.tensors(), {}, **how)
        return {"losses": losses, "state": whole(engine, engine.tensors())}


@pytest.mark.slow
def test_a_model_of_transformers_goes_on_on_another_mesh(pool: Any, tmp_path: Path) -> None:
    folder = str(architectures.folder(tmp_path / "gemma2", "gemma2"))
    fsdp, tp = {"dp": 1, "fsdp": 2, "tp": 1}, {"dp": 1, "fsdp": 1, "tp": 2}
    unbroken = pool.run(leg, folder, range(4), None, None, world=2, mesh=fsdp)[0]
    first = pool.run(leg, folder, range(2), None, str(tmp_path / "out"), world=2, mesh=fsdp)[0]
    rest = pool.run(leg, folder, range(2, 4), str(tmp_path / "out" / "step-000002"), None, world=2, mesh=tp)[0]
    assert first["losses"] + rest["losses"] == pytest.approx(unbroken["losses"], rel=BOUND)
    assert unbroken["losses"][3] < unbroken["losses"][0]
    for name, tensor in unbroken["state"].items():
        assert distance(rest["state"][name], tensor) <= BOUND, name
