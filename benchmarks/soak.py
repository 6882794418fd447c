"""Long training runs of several CPU processes, stopped and resumed, to check that no process dies.

    python benchmarks/soak.py --steps 60000 [--leg 1500] [--at-once 2] [--seed 0] [--record] [--json]

A leg is one run: started, stopped by SIGTERM at a random step, resumed to its last step. It saves every 5 steps and
evaluates every 20. Legs alternate between meshes of two and of four ranks, `--at-once` at a time, without restarts by
the launcher. Exits with 1 if a leg died or did not finish its steps.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from record import Record, parser_of
from running import COMMAND

MESHES = ("{fsdp: 2}", "{fsdp: 4}", "{fsdp: 2}", "{fsdp: 2, tp: 2}")
RECIPE = """
name: soak
cluster: {{device: cpu}}
mesh: {mesh}
model: {{preset: tiny, layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 48, seq_len: 64}}
batch: {{global_sequences: 4}}
compile: eager
train: {{steps: {steps}}}
evaluate: {{every_steps: 20, sequences: 3}}
checkpoint: {{every_steps: 5}}
launch: {{restarts: 0}}
logging: {{every_steps: 5, wandb: null}}
"""


def leg(number: int, steps: int, stop: int, folder: Path) -> dict[str, Any]:
    """Starts, stops and resumes one run; returns its result."""
    mesh = MESHES[number % len(MESHES)]
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE.format(mesh=mesh, steps=steps))
    begun, starts, deaths = time.monotonic(), [], []
    for until in (stop, None):
        code, printed = run(folder, until)
        starts.append(code)
        died = re.findall(r"rank (\d+) was lost: killed by (SIG\w+)(.*)", printed)
        deaths += [{"rank": int(rank), "signal": name, "after": reach(folder)} for rank, name, _ in died]
        if code not in (0, 75) and not died:
            deaths.append({"exit": code, "after": reach(folder), "printed": printed[-500:]})
    row = {
        "leg": number, "mesh": mesh, "steps": reach(folder), "stop": stop, "exits": starts, "deaths": deaths,
        "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip
    if not deaths:
        shutil.rmtree(folder)
    return row


def run(folder: Path, stop: int | None) -> tuple[int, str]:
    """Starts a run, and asks it to stop at a step if given; returns its exit code and output."""
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            [*COMMAND, "train", "recipe.yaml"], cwd=folder, stdout=output, stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        while process.poll() is None:
            time.sleep(0.2)
            if stop is not None and reach(folder) >= stop:
                process.send_signal(signal.SIGTERM)
                stop = None
        output.seek(0)
        return process.returncode, output.read()


def reach(folder: Path) -> int:
    """The last recorded step."""
    try:
        tail = (folder / "runs" / "soak" / "metrics.jsonl").read_bytes()[-2000:]
    except OSError:
        return 0
    return max((int(step) for step in re.findall(rb'"step": (\d+)', tail)), default=0)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=6000, help="steps of all legs together")
    parser.add_argument("--leg", type=int, default=1500, help="steps of a leg")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="seed of the steps at which legs are stopped")
    options = parser.parse_args()
    record = Record("soak", quiet=options.json)
    stops = random.Random(options.seed)
    legs = [stops.randrange(1, options.leg) for _ in range(-(-options.steps // options.leg))]
    folder = Path(tempfile.mkdtemp(prefix="soak-"))

    def go(number: int) -> dict[str, Any]:
        row = leg(number, options.leg, legs[number], folder / f"leg-{number}")
        message = "; ".join(map(str, row["deaths"])) or "whole"
        record.say(f"leg {number}: {row['mesh']}, {row['steps']} steps in {row['seconds']} s: {message}")
        return row

    with ThreadPoolExecutor(options.at_once) as pool:
        record.rows = list(pool.map(go, range(len(legs))))
    done, deaths = sum(row["steps"] for row in record.rows), sum(len(row["deaths"]) for row in record.rows)
    record.figure("steps", done, "steps")
    record.figure("starts", sum(len(row["exits"]) for row in record.rows), "starts")
    record.figure("deaths", deaths, "deaths")
    record.close(write=options.record, as_json=options.json)
    if not deaths:
        shutil.rmtree(folder)
    else:
        record.say(f"what died is kept in {folder}")
    return int(deaths > 0 or done < options.leg * len(legs))


if __name__ == "__main__":
    sys.exit(main())
