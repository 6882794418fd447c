"""`tpshard train` with two workers: killed, stopped on request, and started again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import psutil
import pytest
from forked import Copied, python
from patience import PATIENCE, until
from tpshard.cli.main import run
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.parallelism.runtime.context import Context
from tpshard.plan.questions import plan_error
from tpshard.plan.step.units import SCHEMA
from tpshard.recipes.reading.load import load
from tpshard.train.run import run_plan
from training_cases import train_recipe

RECIPE = """
name: small
cluster: {device: cpu}
mesh: {fsdp: 2}
model: {preset: tiny, layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 48, seq_len: 64}
batch: {global_sequences: 4}
compile: eager
optimizer: {lr: 3.0e-3}
train: {steps: 40}
evaluate: {every_steps: 20, sequences: 3}
checkpoint: {every_steps: 5}
logging: {every_steps: 1, wandb: null}
"""

OWN = """
import torch

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Embedding(2048, 8), torch.nn.Linear(8, 2048))

    def forward(self, tokens, documents=None, positions=None):
        return super().forward(tokens)
"""

ONE: dict[str, Any] = {"world": 1, "mesh": {"dp": 1, "fsdp": 1, "tp": 1}}
TWO: dict[str, Any] = {"world": 2, "mesh": {"dp": 1, "fsdp": 2, "tp": 1}}
"""Workers of the pool."""


def start(folder: Path, *overrides: str) -> Copied:
    return commands.start(folder, "train", "recipe.yaml", *overrides)


def rows(folder: Path, run: str) -> list[dict[str, Any]]:
    try:
        lines = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [json.loads(line) for line in lines]


def record(folder: Path, run: str) -> dict[Any, tuple[Any, ...]]:
    """What must not depend on how often a run was stopped; a step logged twice counts last."""
    keys = ("loss", "grad_norm", "lr", "tokens", "eval_loss")
    return {(r["step"], "eval_loss" in r): tuple(r.get(key) for key in keys) for r in rows(folder, run)}


def running_until(process: Copied, reached: Callable[[], bool]) -> None:
    until(lambda: process.poll() is not None or reached(), "the run's progress")
    assert process.poll() is None, process.communicate()


def train(context: Context, folder: str, recipe: str, *overrides: str) -> str:
    """Trains in the pool, which starts faster than the command, and in its working directory. Returns the mistakes."""
    with contextlib.chdir(folder):
        try:
            train_recipe(context, load(recipe, overrides))
        except Mistakes as mistakes:
            return f"{int(mistakes.exit)}: {mistakes}"
    return ""


def test_a_run_that_is_killed_and_stopped_ends_as_one_that_was_not(pool: Any, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert pool.run(train, str(tmp_path), "recipe.yaml", "run.dir=runs/whole", **TWO) == ["", ""]
    assert rows(tmp_path, "whole")[-1]["eval_loss"] < rows(tmp_path, "whole")[0]["loss"] - 0.1
    names = {path.name for path in (tmp_path / "runs" / "whole").iterdir()}
    assert {"recipe.yaml", "plan.json", "metrics.jsonl", "checkpoints", "logs"} <= names
    assert not list((tmp_path / "runs" / "whole").glob("lock*"))
    # bytes are exact, counted as they are sent
    measured = json.loads((tmp_path / "runs" / "whole" / "plan_measured.json").read_text())
    assert measured["sent_bytes"]["measured"] == measured["sent_bytes"]["predicted"] > 0
    assert measured["collectives"]["measured"] == measured["collectives"]["predicted"] > 0
    assert abs(measured["peak_memory_bytes"]["error"]) < 0.02, measured

    killed = start(tmp_path, "run.dir=runs/other")
    running_until(killed, lambda: len(rows(tmp_path, "other")) > 12)
    _, victim = psutil.Process(killed.pid).children()
    tree = psutil.Process(killed.pid).children(recursive=True)
    victim.kill()
    _, err = killed.communicate(timeout=PATIENCE)
    assert killed.returncode == 9 and "rank 1 was lost: killed by SIGKILL" in err
    assert "4 sequences a step = 2 data ranks x 1 micro-batch of 2" in err and "building the programs" in err
    # the plan is held against the run after some steps, not only at its end
    assert 0 < err.index("planned against measured") < err.index("step 11/40"), err
    assert not psutil.wait_procs(tree, timeout=PATIENCE)[1]

    stopped = start(tmp_path, "run.dir=runs/other")
    steps_before = len(rows(tmp_path, "other"))
    running_until(stopped, lambda: len(rows(tmp_path, "other")) > steps_before + 3)
    stopped.send_signal(signal.SIGTERM)
    out, err = stopped.communicate(timeout=PATIENCE)
    assert stopped.returncode == 75, err
    assert re.search(r"continuing from step (5|10|15|20|25|30|35)\b", err), err
    step = rows(tmp_path, "other")[-1]["step"]
    assert step < 40 and f"stopped, as asked, after step {step} of 40" in out

    assert pool.run(train, str(tmp_path), "recipe.yaml", "run.dir=runs/other", **TWO) == ["", ""]
    assert record(tmp_path, "other") == record(tmp_path, "whole")
    assert {row["run"] for row in rows(tmp_path, "other")} == {1, 2, 3}


@pytest.mark.parametrize(
    ("rank", "number"),
    [
        (0, signal.SIGSEGV),
        pytest.param(1, signal.SIGABRT, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGBUS, marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_worker_crashes_goes_on_by_itself(rank: int, number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    crashed = start(tmp_path, "run.dir=runs/crashed", "train.steps=20", "checkpoint.resume=never")
    running_until(crashed, lambda: len(rows(tmp_path, "crashed")) > 7)
    psutil.Process(crashed.pid).children()[rank].send_signal(number)
    out, err = crashed.communicate(timeout=PATIENCE)
    assert crashed.returncode == 0, err
    assert f"rank {rank} was lost: killed by {number.name} after step" in err
    assert "warning: the run is started again from its last checkpoint (restart 1 of 1" in err
    variants = re.search(r"continuing from step (5|10|15)\b", err)
    assert variants and "restarts      1, after a worker crashed" in out, out
    assert "next:" in out and "tpshard serve runs/crashed" in out and "step 20/20" in err
    log = tmp_path / "runs" / "crashed" / "logs" / f"rank-{rank}.log"
    assert "Fatal Python error" in log.read_text() and "loop.py" in log.read_text() and f"stacks: {log}" in err
    steps = [row for row in rows(tmp_path, "crashed") if "loss" in row]
    assert {(row["run"], row["restarts"]) for row in steps} == {(1, 0), (2, 1)}
    assert [row["step"] for row in steps if row["restarts"]] == list(range(int(variants[1]) + 1, 21))
    twice: dict[int, set[tuple[Any, ...]]] = {}
    for row in steps:
        twice.setdefault(row["step"], set()).add(tuple(row[key] for key in ("loss", "grad_norm", "lr", "tokens")))
    assert len(twice) == 20 and all(len(values) == 1 for values in twice.values()), "a step repeated gave other numbers"


def test_a_run_goes_on_without_its_pipeline(pool: Any, tmp_path: Path) -> None:
    """What is trained again from the checkpoint, on another mesh, comes to the same losses."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    staged = ["run.dir=runs/staged", "model.layers=2", "train.steps=8", "evaluate.every_steps=0"]
    mesh = ["mesh={pp: 2, fsdp: 1}", "pipeline={schedule: 1f1b}"]
    on_stages = {"world": 2, "mesh": {"pp": 2, "dp": 1, "fsdp": 1, "tp": 1}}
    assert pool.run(train, str(tmp_path), "recipe.yaml", *staged, *mesh, **on_stages) == ["", ""]
    shutil.rmtree(tmp_path / "runs" / "staged" / "checkpoints" / "step-000008")
    assert pool.run(train, str(tmp_path), "recipe.yaml", *staged, **TWO) == ["", ""]
    losses = {(row["run"], row["step"]): row["loss"] for row in rows(tmp_path, "staged") if "loss" in row}
    assert sorted(losses) == [*((1, step) for step in range(1, 9)), *((2, step) for step in (6, 7, 8))]
    for step in (6, 7, 8):
        assert losses[2, step] == pytest.approx(losses[1, step], rel=1e-4)


def test_a_disk_that_refuses_the_comparison_ends_no_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(folder: Path) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plan_error, "record", refuse)
    assert "No space left on device" in run_plan.comparison(tmp_path)


def test_a_run_that_nobody_reads_is_done_and_shows_no_secret(tmp_path: Path) -> None:
    """Its output goes to a closed pipe, its messages to a full disk. Its folder holds its model's module, and files
    named as Python's modules, which nothing imports."""
    for name in sys.stdlib_module_names:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the working directory was imported')")
    (tmp_path / "own_model.py").write_text(OWN)
    model = re.search("model: {.*}", RECIPE)
    assert model is not None
    recipe = RECIPE.replace(model[0], "model: {module: 'own_model:Net', seq_len: 64}")
    (tmp_path / "recipe.yaml").write_text(recipe)
    command = [sys.executable, "-P", "-m", "tpshard.cli.main", "train", "recipe.yaml", "mesh.fsdp=1", "train.steps=2"]
    shell = ["bash", "-c", 'set -o pipefail; "$@" 2>/dev/full | true', "bash", *command, "serve.api_key=hunter2"]
    process = subprocess.Popen(shell, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    workers: set[str] = set()
    while process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                if "TPSHARD_RENDEZVOUS" in child.environ():
                    workers.add(" ".join(child.cmdline()))
            except psutil.Error:
                pass
        time.sleep(0.1)
    assert process.returncode == 0
    assert [row["step"] for row in rows(tmp_path, "small") if "loss" in row] == [1, 2]
    assert workers and not any("hunter2" in worker for worker in workers)


def test_a_run_ends_with_7_if_its_last_checkpoint_is_not_written_or_all_are_gone(pool: Any, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    overrides = ["mesh.fsdp=1", "train.steps=2", "evaluate.every_steps=0"]
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200 << 10, 200 << 10))\n"
    failed = python(full + commands.COMMAND, "train", "recipe.yaml", *overrides, folder=tmp_path)
    assert failed.returncode == 7 and "error: the checkpoint of step 2 was not written" in failed.stderr
    assert "File too large" in failed.stderr and "rank" not in failed.stderr.splitlines()[-1]
    assert [row["step"] for row in rows(tmp_path, "small")] == [1, 2]
    again = (train, str(tmp_path), "recipe.yaml", *overrides)
    assert pool.run(*again, **ONE) == [""]
    shutil.rmtree(tmp_path / "runs" / "small" / "checkpoints")
    held = (tmp_path / "runs" / "small" / "metrics.jsonl").read_text()
    (gone,) = pool.run(*again, **ONE)
    assert gone.startswith("7: ") and "the checkpoints of runs/small are gone" in gone and "step 2 was saved" in gone
    assert not (tmp_path / "runs" / "small" / "checkpoints").exists(), "they can be moved back there"
    assert (tmp_path / "runs" / "small" / "metrics.jsonl").read_text() == held


def test_a_run_that_is_there_is_not_touched_when_asked_so(pool: Any, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "runs" / "old" / "checkpoints" / "step-000001").mkdir(parents=True)
    changes = ("mesh.fsdp=1", "run.dir=runs/old", "checkpoint.resume=never")
    (refused,) = pool.run(train, str(tmp_path), "recipe.yaml", *changes, **ONE)
    assert refused.startswith("7: ") and "already contains a run" in refused and "<override 3>" in refused


def test_a_plan_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "plan.json").write_text(json.dumps({"schema": SCHEMA, "recipe": "", "programs": {}, "plan": {}}))
    (tmp_path / "runs" / "old").mkdir(parents=True)
    (tmp_path / "runs" / "old" / "recipe.yaml").write_text("name: before")
    held = {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")}
    refused = start(tmp_path, "mesh.fsdp=1", "run.dir=runs/old", "--plan", "plan.json")
    _, err = refused.communicate(timeout=PATIENCE)
    assert refused.returncode == 4 and "plan.json is for another program" in err, err
    assert {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")} == held


def test_a_run_executes_the_plan_that_was_saved(pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    ends = ["mesh.fsdp=1", "train.steps=3", "evaluate.every_steps=3"]
    assert run(["plan", "recipe.yaml", *ends, "run.dir=planned"]) == 0
    plan = tmp_path / "planned" / "plan.json"
    assert pool.run(train, str(tmp_path), "recipe.yaml", *ends, "run.dir=runs/built", **ONE) == [""]
    process = start(tmp_path, *ends, "run.dir=runs/read", "--plan", str(plan))
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert "nothing is planned again" in err and "building the programs" not in err, err
    assert record(tmp_path, "read") == record(tmp_path, "built") and len(record(tmp_path, "read")) == 4
    assert (tmp_path / "runs" / "read" / "plan.json").read_text() == plan.read_text()


def test_a_mesh_that_does_not_fit_the_workers_is_refused_with_near_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("cluster: {device: cpu}", ""))
    torchrun = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    done = commands.tpshard(tmp_path, "train", "recipe.yaml")
    assert done.returncode == 5 and "fsdp: 3" in done.stderr


def test_more_hosts_than_were_launched_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("{device: cpu}", "{device: cpu, nodes: 2}"))
    refused = start(tmp_path)
    _, err = refused.communicate(timeout=PATIENCE)
    assert refused.returncode == 5 and "tpshard launch --nodes 2" in err
    assert not (tmp_path / "runs").exists()
