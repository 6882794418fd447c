"""Runs on a machine with one GPU what no CPU can show, in steps with a time limit each, and keeps what each step says.

    python benchmarks/first_lease.py --out DIR [--stages ABC] [--steps NAME ...] [--preset llama3-8b] [--list]

A: correctness (the tests of `make gpu`, `tpshard doctor`). B: kernels and `doctor --measure`. C: training and serving
as a user does, beside the plan and beside transformers. Each stage takes at most nine minutes. Every step is a process
of its own: whatever it does, its line is appended to DIR/lease.jsonl at once, with its exit code, seconds, figures and
the end of its output; DIR/logs.txt has the whole of it. Needs torch, Triton and the packages of pyproject.toml, except
wandb. Exits with 1 if a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import machine, versions

ROOT = Path(__file__).resolve().parents[1]
TPSHARD = [sys.executable, "-m", "tpshard.cli.main"]
END = 3000
"""Characters of a step's output that its line keeps."""


@dataclass(frozen=True)
class Step:
    name: str
    stage: str
    command: list[str]
    limit_s: int
    figures: Callable[[Path, str], Any] = lambda folder, output: None
    """What the step measured, from its folder and its output."""


# ---- training --------------------------------------------------------------------------------------------------------
RECIPE = """
name: NAME
extends: llama3-1b
cluster: {device: DEVICE, devices_per_node: 1}
mesh: {fsdp: 1}
model: {seq_len: 4096}
data: {source: sample, tokenizer: null}
batch: {global_sequences: 4, per_device: 1}
train: {steps: 12}
schedule: {warmup_steps: 2}
evaluate: {every_steps: 0}
checkpoint: {every_steps: 0}
logging: {every_steps: 1, wandb: null}
"""


def trained(folder: Path, output: str) -> dict[str, Any]:
    """Median step time, loss and memory of a run, beside its plan."""
    (run,) = (folder / "runs").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    measured = run / "plan_measured.json"
    return {
        "first": steps[0], "last": steps[-1], "losses": [row["loss"] for row in steps],
        "step_s": statistics.median(row["step_s"] for row in steps[3:]) if "step_s" in steps[-1] else None,
        "planned": json.loads(measured.read_text()) if measured.exists() else None,
    }  # fmt: skip


def training(name: str, out: Path, device: str, limit_s: int, *overrides: str) -> Step:
    folder = out / "work" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(RECIPE.replace("NAME", name).replace("DEVICE", device))
    return Step(name, "C", [*TPSHARD, "train", "recipe.yaml", *overrides], limit_s, trained)


# ---- all steps -------------------------------------------------------------------------------------------------------
def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def last_json(folder: Path, output: str) -> Any:
    """The rows of numbers that a step printed, each on one line."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{") and line.endswith("}")]


def steps(out: Path, preset: str) -> Iterator[Step]:
    benchmarks, measured = ROOT / "benchmarks", out / "h100.yaml"
    device = str(measured) if measured.exists() else "h100-sxm-80g"
    tests = [
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-n",
        "12",
        "--durations=25",
        "-v",
        "-rf",
        "--tb=short",
        "-p",
        "no:benchmark",
        str(ROOT / "tests" / "gpu"),
    ]
    yield Step("tests", "A", python(*tests), 240)
    yield Step("doctor", "A", [*TPSHARD, "doctor"], 60)
    yield Step("measure", "B", [*TPSHARD, "doctor", "--measure", str(measured)], 90, lambda *_: measured.read_text())
    yield Step("rates", "B", python(str(benchmarks / "gpu_rates.py")), 60)
    yield Step("kernels", "B", python(str(benchmarks / "kernels.py"), "--json", "--models", "llama3-8b"), 200)
    yield training("eager", out, device, 75, "compile=eager")
    yield training("blocks", out, device, 150, "compile=blocks")
    yield training("inductor", out, device, 240, "compile=inductor")
    yield training("no-remat", out, device, 120, "compile=blocks", "remat=none", "batch.per_device=2")
    yield training("fp8", out, device, 150, "compile=blocks", "model.dtype=fp8")
    peer = str(benchmarks / "gpu_peer.py")
    yield Step("peer-train", "C", python(peer, "train"), 150, last_json)
    folders = {kind: str(out / "work" / kind) for kind in ("quantized", "dense")}
    for kind, folder in folders.items():
        flags = ["--preset", preset, "--device", "cuda", *(["--quantized"] if kind == "quantized" else [])]
        yield Step(f"write-{kind}", "C", python(str(benchmarks / "random_llama.py"), folder, *flags), 90)
        served = python(str(benchmarks / "gpu_serving.py"), folder)
        yield Step(f"serve-{kind}", "C", served, 150, last_json)
    yield Step("peer-serve", "C", python(peer, "serve", folders["dense"]), 100, last_json)


def run(step: Step, out: Path) -> dict[str, Any]:
    """Runs a step to its end or limit; never raises for what the step did."""
    folder = out / "work" / step.name
    folder.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(filter(None, [str(ROOT / "types"), os.environ.get("PYTHONPATH")]))
    began = time.perf_counter()
    with (out / "logs.txt").open("a+") as logs:
        logs.write(f"\n==== {step.name}: {' '.join(step.command)}\n")
        logs.flush()
        start = logs.tell()
        process = subprocess.Popen(
            step.command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, stdout=logs, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | str = process.wait(timeout=step.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            code = f"stopped after {step.limit_s} s"
        logs.seek(start)
        output = logs.read()
    row = {"step": step.name, "stage": step.stage, "code": code, "seconds": round(time.perf_counter() - began, 1)}
    try:
        row["figures"] = step.figures(folder, output)
    except Exception as error:
        row["figures"] = f"none: {type(error).__name__}: {error}"
    return row | {"end": output[-END:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", default="ABC")
    parser.add_argument("--steps", nargs="*")
    parser.add_argument("--preset", default="llama3-8b", help="the model that is served")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    names = [s.name for s in steps(out, options.preset)]
    for name in names:
        step = next(s for s in steps(out, options.preset) if s.name == name)  # anew: a step before may have measured
        if (options.steps is not None and name not in options.steps) or step.stage not in options.stages:
            continue
        if options.list:
            print(f"{step.stage} {step.name:<16} {step.limit_s:>4} s  {' '.join(step.command[1:])}")
            continue
        row = run(step, out)
        failed |= row["code"] != 0
        with (out / "lease.jsonl").open("a") as lines:
            lines.write(json.dumps(row | {"machine": machine(), "versions": versions("transformers")}) + "\n")
        print(f"{row['step']:<16} {row['code']!s:<24} {row['seconds']:>6} s", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
