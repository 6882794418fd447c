"""Steps with a time limit each on a machine that is lent for a short while, and what each of them says.

Every step is a process of its own: whatever it does, its line is appended to DIR/lease.jsonl at once, with its exit
code, seconds, figures and the end of its output; DIR/logs.txt has the whole of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from record import ROOT, machine, versions

BENCHMARKS = ROOT / "benchmarks"
TPSHARD = [sys.executable, "-m", "tpshard.cli.main"]
STAGE_S = 540
"""Seconds of a stage: its later steps have what the earlier ones leave."""
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


def python(*arguments: str) -> list[str]:
    """The command of a script of this folder, or of another module."""
    script = BENCHMARKS / arguments[0]
    return [sys.executable, *([str(script), *arguments[1:]] if script.is_file() else arguments)]


def json_lines(folder: Path, output: str) -> Any:
    """The rows of numbers that a step printed, each on one line."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{") and line.endswith("}")]


# ---- training --------------------------------------------------------------------------------------------------------
def training(name: str, stage: str, out: Path, recipe: str, limit_s: int, *overrides: str) -> Step:
    """A run of a recipe, in which NAME stands for the step's name."""
    folder = out / "work" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(recipe.replace("NAME", name))
    return Step(name, stage, [*TPSHARD, "train", "recipe.yaml", *overrides], limit_s, trained)


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


# ---- running ---------------------------------------------------------------------------------------------------------
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


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    """The last line of each step so far, by its name."""
    file = out / "lease.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return {row["step"]: row for row in map(json.loads, lines)}


def parser_of(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", default="ABC")
    parser.add_argument("--steps", nargs="*")
    parser.add_argument("--list", action="store_true", help="print the steps with their limits, and run none")
    return parser


def run_all(options: argparse.Namespace, steps: Callable[[Path], Iterator[Step]]) -> int:
    """Runs the chosen steps in order, each made anew, since a step before may have measured what it needs; those for
    which their stage has no time left have a line that says so. Returns 1 if one failed, else 0."""
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    failed, spent = False, Counter[str]()
    for name in [step.name for step in steps(out)]:
        step = next(step for step in steps(out) if step.name == name)
        if (options.steps is not None and name not in options.steps) or step.stage not in options.stages:
            continue
        if options.list:
            print(f"{step.stage} {step.name:<16} {step.limit_s:>4} s  {' '.join(step.command[1:])}")
            continue
        left = max(0, int(STAGE_S - spent[step.stage]))
        row = run(replace(step, limit_s=min(step.limit_s, left)), out)
        spent[step.stage] += row["seconds"]
        failed |= row["code"] != 0
        with (out / "lease.jsonl").open("a") as lines:
            lines.write(json.dumps(row | {"machine": machine(), "versions": versions("transformers")}) + "\n")
        print(f"{row['step']:<16} {row['code']!s:<24} {row['seconds']:>6} s", flush=True)
    return int(failed)
