"""Compares predicted and measured step time on this machine, for the quickstart and three other recipes.

    python benchmarks/plan_this_machine.py [--steps N] [--turns N] [--device FILE]

In every turn `tpshard doctor --measure` fits the machine into a device file (`--device` uses an existing one instead);
then each recipe is planned with it and trained for a few steps. A turn's constants do not depend on its runs, nor on
earlier turns. `ratio` is the median of predicted / measured over the turns, which `turns` lists. Exits with 1 if a
ratio is more than 20% off. Leave the machine alone meanwhile: `others` is the number of cores that other processes kept
busy. `pace` is the time of a fixed piece of work around a run over that around the measurement; if it is not 1, the
machine's speed has changed in between, as that of virtual machines does.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil
import torch
from tpshard.plan.questions import plan_error

from record import Record, parser_of
from running import tpshard

WITHIN = 0.2
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
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
"""The recipes besides the quickstart; they differ in the number of processes, mesh and width."""


def dashed(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def commands(folder: str, device: Path, steps: int) -> dict[str, list[str]]:
    """Name -> arguments of `tpshard train`."""
    same = ["evaluate.every_steps=0", "checkpoint.every_steps=0", "logging.every_steps=1", "logging.wandb=null"]
    by_name = {"quickstart": ["quickstart", f"cluster.device={device}", f"train.steps={steps}", *same]}
    for name, text in OTHERS.items():
        file = Path(folder) / f"{dashed(name)}.yaml"
        cluster = f"cluster: {{device: {device}}}\n"
        file.write_text(COMMON.format(name=file.stem, steps=steps) + cluster + text)
        by_name[name] = [str(file)]
    return by_name


def cpu_seconds_of_others() -> float:
    """CPU seconds of all cores, less those of this script and its ended processes."""
    times = psutil.cpu_times()
    return sum(times[:8]) - times.idle - getattr(times, "iowait", 0.0) - sum(os.times()[:4])


def others_busy(before: float, begun: float) -> float:
    """Cores that other processes kept busy since they had used `before` seconds."""
    return max(0.0, (cpu_seconds_of_others() - before) / (time.monotonic() - begun))


def pace() -> float:
    """Seconds in which all cores do a fixed amount of work: matrix products, and sums of more than the caches hold."""
    a, x = torch.ones(768, 768), torch.ones(1 << 22)
    seconds = []
    for _ in range(12):
        begun = time.perf_counter()
        for _ in range(2):
            torch.mm(a, a), torch.add(x, x)
        seconds.append(time.perf_counter() - begun)
    return sum(sorted(seconds)[2:-2]) / 8


@dataclass(frozen=True)
class Run:
    """Predicted and measured seconds of a run's median step, cores kept busy by others, and `pace` since measuring."""

    step: dict[str, float]
    exposed: dict[str, float]
    others: float
    pace: float

    @property
    def ratio(self) -> float:
        return self.step["predicted"] / self.step["measured"]


def run(arguments: list[str], folder: Path, then: float) -> Run:
    """Trains a recipe. `then`: the `pace` around the measurement of its device file."""
    folder.mkdir()
    earlier, begun, before = pace(), time.monotonic(), cpu_seconds_of_others()
    tpshard("train", *arguments, cwd=folder, env=ENVIRONMENT)
    others, now = others_busy(before, begun), (earlier + pace()) / 2
    comparison = plan_error.compare(folder / "runs" / Path(arguments[0]).stem)
    assert comparison is not None, "a run leaves its plan and its steps"
    nothing = {"predicted": 0.0, "measured": 0.0}
    return Run(comparison["step_s"], comparison.get("exposed_comm_s", nothing), others, now / then)


def turn(folder: Path, steps: int, device: Path | None) -> dict[str, Run]:
    """Measures the machine unless there is a device file, and trains each recipe once."""
    before, begun, then = cpu_seconds_of_others(), time.monotonic(), pace()
    file = device or folder / "this-machine.yaml"
    if device is None:
        tpshard("doctor", "--measure", str(file), cwd=folder, env=ENVIRONMENT)
        busy = others_busy(before, begun)
        print(f"tpshard doctor --measure: {time.monotonic() - begun:.0f} s, others {busy:.2f}", file=sys.stderr)
        then = (then + pace()) / 2
    recipes = commands(str(folder), file, steps)
    return {name: run(arguments, folder / f"run-{i}", then) for i, (name, arguments) in enumerate(recipes.items())}


HEAD = "step, ms            predicted  measured  ratio  turns            exposed: predicted  measured  others   pace"


def table(turns: list[dict[str, Run]]) -> tuple[str, float]:
    """(a row per recipe, the largest relative error)"""
    lines, worst = [HEAD], 0.0
    for name in turns[0]:
        runs = [each[name] for each in turns]
        ratio, each = median(one.ratio for one in runs), " ".join(f"{one.ratio:.2f}" for one in runs)
        worst = max(worst, abs(ratio - 1))
        times = [1e3 * median(one.step[key] for one in runs) for key in ("predicted", "measured")]
        waits = [1e3 * median(one.exposed[key] for one in runs) for key in ("predicted", "measured")]
        lines.append(
            f"{name:<19} {times[0]:>9.0f} {times[1]:>9.0f} {ratio:>6.2f}  {each:<15}{waits[0]:>19.0f} {waits[1]:>9.0f} "
            f"{max(one.others for one in runs):>7.2f} {median(one.pace for one in runs):>6.2f}"
        )
    lines.append(f"worst {100 * worst:.0f}%, {'within' if worst <= WITHIN else 'beyond'} {100 * WITHIN:.0f}%")
    return "\n".join(lines), worst


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3, help="measurements, each with a run of every recipe")
    parser.add_argument("--device", type=Path, help="a device file that is there already")
    options = parser.parse_args()
    record = Record("plan_this_machine", quiet=options.json)
    turns = []
    for _ in range(options.turns):
        with tempfile.TemporaryDirectory() as folder:
            turns.append(turn(Path(folder), options.steps, options.device and options.device.resolve()))
    text, worst = table(turns)
    record.say(text)
    record.rows += [{"recipe": name, **asdict(run)} for each in turns for name, run in each.items()]
    for name in turns[0]:
        record.figure(f"{dashed(name)}.ratio", [each[name].ratio for each in turns], "predicted / measured")
    record.figure("worst", 100 * worst, "% off")
    record.close(write=options.record, as_json=options.json)
    return 0 if worst <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
