"""Training on one device equals autograd on the CPU."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import tpshard
from tpshard.parallelism.runtime.context import Context
from tpshard.programs.compare.float64 import distance, float64
from tpshard.programs.step import training
from tpshard.serve.engine.cuda_graphs import Captured
from training_cases import assert_trained, reference, setting_of, train


def collectives(context: Context) -> None:
    funcol = torch.ops._c10d_functional
    assert context.gather({"rank": 0}) == [{"rank": 0}] and context.from_main("x") == "x"
    context.agree({"what": "the same"})
    context.barrier()
    own = dist.new_group([0], backend=context.groups.backend)  # as `Groups` makes them, of two devices at least
    for group in (dist.group.WORLD, own):
        assert group is not None
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            x, name = torch.arange(6, device=context.device).to(dtype), group.group_name
            for result in (
                funcol.all_reduce(x, "sum", name), funcol.all_gather_into_tensor(x, 1, name),
                funcol.reduce_scatter_tensor(x, "sum", 1, name), funcol.all_to_all_single(x, [6], [6], name),
            ):  # fmt: skip
                assert torch.equal(funcol.wait_tensor(result), x)
    if context.device.type == "cuda":
        captured_collectives(context, own.group_name)


def captured_collectives(context: Context, group: str) -> None:
    """A step whose collectives are replayed with its kernels, as a server of several devices captures its steps."""
    funcol = torch.ops._c10d_functional

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        summed = funcol.wait_tensor(funcol.all_reduce(x * 2, "sum", group))
        gathered = funcol.wait_tensor(funcol.all_gather_into_tensor(summed + 1, 1, group))
        return [funcol.wait_tensor(funcol.reduce_scatter_tensor(gathered, "sum", 1, group)) * 3]

    run = Captured(step, [0], torch.cuda.graph_pool_handle())
    for value in (1.0, 5.0, -2.0):
        (result,) = run(torch.full((4, 8), value, device=context.device))
        assert torch.equal(result.cpu(), torch.full((4, 8), (value * 2 + 1) * 3))


def test_start_up_groups_and_collectives(pool: Any, device: str) -> None:
    """NCCL's, where there is a GPU: a group of one device gives back what it gets."""
    pool.run(collectives, world=1, mesh={"fsdp": 1, "tp": 1}, device=device)


def trained(context: Context, wide: bool, *overrides: str) -> dict[str, Any]:
    """Three steps, in float64 or in the dtypes of the recipe."""
    with float64() if wide else nullcontext():
        return train(context, training.build(setting_of({}, *overrides)))


def alone(pool: Any, device: str, wide: bool, *overrides: str) -> dict[str, Any]:
    result: dict[str, Any]
    (result,) = pool.run(trained, wide, *overrides, world=1, mesh={"dp": 1, "fsdp": 1, "tp": 1}, device=device)
    return result


def test_steps_are_those_of_autograd_on_the_cpu(pool: Any, device: str) -> None:
    assert_trained(alone(pool, device, True), reference())


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        ([], 1e-4),
        pytest.param(["compile=inductor"], 1e-4, marks=pytest.mark.gpu),  # on the CPU: tests/train/test_compiled.py
        (["offload=activations", "compile=eager"], 1e-4),
        pytest.param(["offload=activations", "compile=inductor"], 1e-4, marks=pytest.mark.gpu),
        (["fsdp.param_dtype=bf16"], 0.1),
        (["fsdp.param_dtype=bf16", "remat=full", "fsdp.reduce_dtype=bf16"], 0.1),
    ],
    ids=str,
)
def test_gradients_in_the_dtypes_of_a_run(overrides: list[str], bound: float, pool: Any, device: str) -> None:
    """bf16 takes the flash kernels on a GPU: heads of 8."""
    actual, expected = alone(pool, device, False, *overrides), reference()
    for name, grad in expected["grads"].items():
        assert distance(actual["grads"][name].double(), grad) <= bound, name
    assert actual["losses"] == pytest.approx(expected["losses"], rel=bound / 10)


# ---- as a user does ----------------------------------------------------------------------------------------------
RECIPE = """
name: small
model: {preset: tiny, layers: 2, seq_len: 128, dtype: bf16}
mesh: {fsdp: 1}
batch: {global_sequences: 4}
train: {steps: 12}
evaluate: {every_steps: 6, sequences: 4}
checkpoint: {every_steps: 6}
logging: {every_steps: 1, wandb: null}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps on one GPU, stopped by nothing."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "recipe.yaml").write_text(RECIPE)
    done = tpshard(folder, "train", "recipe.yaml")
    assert done.returncode == 0, done.stderr
    return folder


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.gpu
def test_a_run_learns_and_knows_its_peak_memory(run: Path) -> None:
    steps = [row for row in rows(run, "small") if "loss" in row]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.2, steps  # 0.4 on a CPU, 0.3 on an H100
    assert steps[-1]["peak_memory_bytes"] > 2**20 and steps[-1]["exposed_comm_s"] is None
    held = json.loads((run / "runs" / "small" / "plan_measured.json").read_text())
    assert abs(held["peak_memory_bytes"]["error"]) < 0.5, held


@pytest.mark.gpu
def test_a_run_continues_where_it_was_stopped(run: Path) -> None:
    """Bit for bit: a step that is not deterministic would show."""
    schedule = ("schedule.warmup_steps=1", "schedule.decay_steps=12")
    first = tpshard(run, "train", "recipe.yaml", "name=other", "train.steps=6", *schedule)
    assert first.returncode == 0, first.stderr
    second = tpshard(run, "train", "recipe.yaml", "name=other", *schedule)
    assert second.returncode == 0 and "continuing from step 6" in second.stderr, second.stderr
    whole = tpshard(run, "train", "recipe.yaml", "name=whole", *schedule)
    assert whole.returncode == 0, whole.stderr
    late = [
        {row["step"]: (row["loss"], row["grad_norm"]) for row in rows(run, name) if "loss" in row and row["step"] > 6}
        for name in ("other", "whole")
    ]
    assert late[0] == late[1] and len(late[0]) == 6


@pytest.mark.gpu
def test_a_device_that_is_too_small_is_told_and_leaves_the_checkpoint(run: Path) -> None:
    before = sorted((run / "runs" / "small" / "checkpoints").iterdir())
    overrides = ["model.layers=64", "model.width=8192", "model.heads=64", "model.kv_heads=64", "model.head_dim=128",
            "model.mlp=28672", "train.steps=24", "name=big"]  # fmt: skip
    done = tpshard(run, "train", "recipe.yaml", *overrides)
    assert done.returncode == 4 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert sorted((run / "runs" / "small" / "checkpoints").iterdir()) == before
