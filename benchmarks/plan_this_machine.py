"""Predicted against measured step time on the machine it runs on: the quickstart and three other recipes.

    python benchmarks/plan_this_machine.py [--steps N] [--device FILE]

First `tpshard doctor --measure` fits the machine into a device file (`--device` takes one that is there instead), then
each recipe is planned with it and trained for a few steps. Exits with 1 where a prediction is more than 20% off the
median step. Leave the machine alone meanwhile: `others` says how many of its cores something else kept busy. `pace` is
the time of a fixed piece of work around each run against that around the measurement; away from 1 the machine itself
has changed its speed since (a virtual one does), which no constants can know.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from tpshard.plan import compare

WITHIN = 0.2
COMMON = """schema: 1
name: {name}
data: {{source: sample}}
optimizer: {{lr: 1.0e-3}}
compile: eager
train: {{steps: {steps}}}
evaluate: {{every_steps: 0}}
checkpoint: {{every_steps: 0}}
logging: {{every_steps: 1, wandb: null}}
"""
OTHERS = {
    "one process": "model: {preset: tiny}\nbatch: {global_sequences: 16}\n",
    "four, fsdp, wider": (
        "mesh: {fsdp: 4}\nmodel: {preset: tiny, layers: 2, width: 256, heads: 8, kv_heads: 4, head_dim: 32, mlp: 768}\n"
        "batch: {global_sequences: 16}\n"
    ),
    "two, tp, sequence": (
        "mesh: {tp: 2}\nmodel: {preset: tiny, layers: 3, width: 384, heads: 12, kv_heads: 4, head_dim: 32, mlp: 1024}\n"
        "sharding: {rules: {batch: [dp, fsdp], vocab: tp, heads: tp, mlp: tp, seq_sp: tp}, "
        'annotate: {"layers.*.residual": [batch, seq_sp, embed]}}\n'
        "batch: {global_sequences: 16}\n"
    ),
}
"""Recipes besides the quickstart: another number of processes, mesh and width each."""


def tpshard(*arguments: str, folder: str) -> None:
    """A command of this installation, or the end of this script with what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "tpshard.cli.main", *arguments], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"tpshard {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-2000:]}")


def commands(folder: str, device: Path, steps: int) -> dict[str, list[str]]:
    """Name -> arguments of `tpshard train`."""
    same = ["evaluate.every_steps=0", "checkpoint.every_steps=0", "logging.every_steps=1", "logging.wandb=null"]
    found = {"quickstart": ["quickstart", f"cluster.device={device}", f"train.steps={steps}", *same]}
    for name, text in OTHERS.items():
        file = Path(folder) / f"{name.replace(', ', '-').replace(' ', '-')}.yaml"
        cluster = f"cluster: {{device: {device}}}\n"
        file.write_text(COMMON.format(name=file.stem, steps=steps) + cluster + text)
        found[name] = [str(file)]
    return found


def others_busy(before: tuple[float, float], begun: float) -> float:
    """Cores that something else than this script's processes kept busy since `before` = (all, ours) seconds."""
    everything, ours = cpu_seconds()
    return max(0.0, (everything - before[0] - (ours - before[1])) / (time.monotonic() - begun))


def cpu_seconds() -> tuple[float, float]:
    """Seconds that all cores worked, and that this script's processes (the ended ones) did."""
    times, own = psutil.cpu_times(), os.times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    return sum(times[:8]) - idle, own.user + own.system + own.children_user + own.children_system


def pace() -> float:
    """Seconds that a fixed piece of work takes all cores: products, and sums that no cache holds."""
    a, x = torch.ones(768, 768), torch.ones(1 << 22)
    taken = []
    for _ in range(12):
        begun = time.perf_counter()
        for _ in range(2):
            torch.mm(a, a), torch.add(x, x)
        taken.append(time.perf_counter() - begun)
    return sum(sorted(taken)[2:-2]) / 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device", type=Path, help="a device file that is there already")
    asked = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.processor() or platform.machine()}, {cores} cores, {psutil.virtual_memory().total / 2**30:.0f} "
          f"GiB, torch {torch.__version__}, {datetime.date.today()}")  # fmt: skip
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        device = asked.device.resolve() if asked.device else Path(folder) / "this-machine.yaml"
        then, before = pace(), cpu_seconds()
        if asked.device is None:
            tpshard("doctor", "--measure", str(device), folder=folder)
            busy = others_busy(before, begun)
            print(f"tpshard doctor --measure: {time.monotonic() - begun:.0f} s, others {busy:.2f}")
            then = (then + pace()) / 2
        print("recipe              predicted ms  measured ms   ratio   exposed ms: predicted  measured  others   pace")
        for name, arguments in commands(folder, device, asked.steps).items():
            earlier, begun, before = pace(), time.monotonic(), cpu_seconds()
            tpshard("train", *arguments, folder=folder)
            busy, now = others_busy(before, begun), (earlier + pace()) / 2
            found = compare.compare(Path(folder) / "runs" / Path(arguments[0]).stem)
            assert found is not None, "a run leaves its plan and its steps"
            step, exposed = found["step_s"], found.get("exposed_comm_s", {"predicted": 0.0, "measured": 0.0})
            worst = max(worst, abs(step["error"]))
            print(
                f"{name:<19} {1e3 * step['predicted']:>12.0f} {1e3 * step['measured']:>12.0f} "
                f"{1 + step['error']:>7.2f} {1e3 * exposed['predicted']:>22.0f} {1e3 * exposed['measured']:>9.0f} "
                f"{busy:>7.2f} {now / then:>6.2f}",
                flush=True,
            )
    print(f"worst {100 * worst:.0f}%, {'within' if worst <= WITHIN else 'beyond'} {100 * WITHIN:.0f}%")
    return 0 if worst <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
