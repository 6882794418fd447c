"""A stopped run of any transformers model continues on another mesh with the same results, which transformers loads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from tpshard.cli.main import run
from tpshard.diagnostics.diagnostic import Exit
from tpshard.models.transformers_model import TransformersModel
from tpshard.parallelism.runtime.context import Context
from tpshard.programs.compare.float64 import BOUND, distance, float64
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads
from tpshard.train.checkpoints.checkpoint import save
from tpshard.train.checkpoints.restore import open_checkpoint
from tpshard.train.run.training_engine import TrainingEngine
from training_cases import SEED, global_batch, whole

RECIPE = """
name: theirs
cluster: {{device: cpu}}
mesh: {mesh}
model: {{transformers: {folder}, seq_len: 12, dtype: fp32}}
batch: {{global_sequences: 12, per_device: {rows}}}
compile: eager
"""


ALONE, SPLIT, SHARDED = {"dp": 1, "fsdp": 1, "tp": 1}, {"dp": 1, "fsdp": 1, "tp": 2}, {"dp": 1, "fsdp": 2, "tp": 1}
ALL = {"dp": 2, "fsdp": 2, "tp": 2}


def leg(context: Context, folder: str, steps: range, source: str | None, out: str | None) -> dict[str, Any]:
    """Trains some steps from the start or a checkpoint; returns losses and the whole final state."""
    with float64():
        axes = dict(context.mesh.axes)
        each = 3 if axes["dp"] * axes["fsdp"] > 1 else 6
        setting = Setting.of(loads(RECIPE.format(mesh=axes, folder=folder, rows=each)))
        spec = TransformersModel.of_folder(folder)
        engine = TrainingEngine(training.build(setting), context, spec.initial_block)
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
            save(Path(out), steps.stop, engine.tensors(), {"model": spec.to_json()}, **how)
        return {"losses": losses, "state": whole(engine, engine.tensors())}


@pytest.mark.slow
@pytest.mark.parametrize("name", architectures.CONFIGS)
def test_a_model_of_transformers_goes_on_on_another_mesh(name: str, pool: Any, tmp_path: Path) -> None:
    folder, out = str(architectures.folder(tmp_path / name, name)), str(tmp_path / "checkpoints")
    mesh = ALL if name in ("llama", "qwen3_moe", "mamba") else SHARDED
    unbroken = pool.run(leg, folder, range(4), None, None, world=1, mesh=ALONE)[0]
    first = pool.run(leg, folder, range(2), None, out, world=2, mesh=SPLIT)[0]
    rest = pool.run(leg, folder, range(2, 4), f"{out}/step-000002", out, world=math.prod(mesh.values()), mesh=mesh)[0]
    assert first["losses"] + rest["losses"] == pytest.approx(unbroken["losses"], rel=BOUND)
    assert unbroken["losses"][3] < unbroken["losses"][0]
    largest: dict[str, float] = {}  # norm, of the parameters and of each moment; the keys' bias is rounding alone
    for path, tensor in unbroken["state"].items():
        largest[path.rpartition("/")[0]] = max(largest.get(path.rpartition("/")[0], 0.0), float(tensor.norm()))
    for path, tensor in unbroken["state"].items():
        assert distance(rest["state"][path], tensor, largest[path.rpartition("/")[0]]) <= BOUND, path

    taken = str(tmp_path / "taken")
    assert run(["convert", f"{out}/step-000004", taken, "--dtype", "fp32"]) == Exit.DONE
    loaded, info = type(architectures.own(name)).from_pretrained(taken, output_loading_info=True)
    assert not any(info[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for path, parameter in loaded.named_parameters():
        assert torch.equal(parameter, rest["state"][path].float()), path
