"""Compares predicted and measured time of a server's steps on this machine's CPU, at several numbers of requests.

    python benchmarks/plan_serving_here.py [--device FILE] [--requests 1,8,64] [--tp 1] [--layers 8] [--width 1024]
        [--steps 8]

The machine is measured as by `tpshard doctor --measure`, but with one and two processes that share one core; then the
models of `serving_speed.py` are planned with the result, and workers of the server with one thread each compute steps
of one token per request after 48 others. All times are CPU seconds of processes with one thread, so that other programs
on the machine count little. Those of tp 2 add up, as two processes take turns on one core; but a plan has the waits for
the other process too, which are long on a busy machine and cost no CPU. `ratio` is predicted / measured, the median of
`--repeat`. Exits with 1 if one is more than 20% off. AVX2's record: see `serving_speed.py`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path

import numpy as np
import psutil
import torch
from tpshard.devices.measuring import measure
from tpshard.parallelism.pricing.fusion import CacheReads
from tpshard.plan.server.server_prices import StepPrices
from tpshard.plan.server.server_steps import server_of
from tpshard.programs.scheduling.request import Sampling, Sequence
from tpshard.programs.server.serving import BLOCK_SIZE, build_serving
from tpshard.recipes.reading.load import loads
from tpshard.serve.engine.picks import CHOOSE, picks_of
from tpshard.serve.engine.ranks import Ranks
from tpshard.serve.engine.step import StepInput

from record import Record, parser_of
from serving_speed import WORKER, config_of, job, write_models

WITHIN, AT = 0.2, 48


def device_file(folder: Path) -> Path:
    """Measures the machine with one core, and writes its device file."""
    results = measure.workers([1, 2], 1, lambda line: print(line, file=sys.stderr))
    memory = psutil.virtual_memory().total
    file = folder / "this-machine.yaml"
    file.write_text(measure.device_file("this-machine", "2026-01-01", 1, memory, results))
    return file


def step_of(requests: int) -> StepInput:
    """One token for each of several sequences with `AT` tokens."""
    blocks = AT // BLOCK_SIZE + 1
    tables = np.arange(1, 1 + requests * blocks).reshape(requests, blocks)
    rows, positions = np.arange(requests), np.full(requests, AT)
    return StepInput(rows, positions, tables[:, -1] * BLOCK_SIZE + AT % BLOCK_SIZE, rows, tables, rows)


def planned(recipe_text: str, device: Path, tp: int, requests: list[int]) -> dict[int, float]:
    """Seconds of the programs for so many requests."""
    recipe = loads(recipe_text, [f"cluster.device={device}", f"cluster.devices_per_node={tp}"])
    setting, one_device, per_host = server_of(recipe)
    programs = build_serving(setting, [setting.fitting(count) for count in requests])
    prices = StepPrices(programs.by_size, one_device.shared_by(per_host), per_host)
    blocks = AT // BLOCK_SIZE + 1
    return {count: prices(count, CacheReads(blocks * count, blocks)) for count in requests}


def measured(ranks: Ranks, requests: int, steps: int) -> float:
    """CPU seconds of all workers in a step, the mean of some."""
    workers = [p for p in psutil.Process().children() if "serve_worker" in " ".join(p.cmdline())]

    def cpu_seconds() -> float:
        return sum(sum(worker.cpu_times()[:2]) for worker in workers)

    batch = step_of(requests)
    picks = picks_of([(Sequence((1,), Sampling(temperature=0), 1), CHOOSE)] * requests)
    ranks.step(batch, picks)
    before = cpu_seconds()
    for _ in range(steps):
        ranks.step(batch, picks)
    return (cpu_seconds() - before) / steps


def compare(options: argparse.Namespace, folder: Path, record: Record) -> float:
    """Adds a row for each tp, dtype and number of requests; returns the largest relative error."""
    device, worst = options.device or device_file(folder), 0.0
    record.texts["device"] = device.read_text()
    dense, quantized = write_models(folder, config_of(options.layers, options.width))
    ways = product(options.tp, (("fp32", dense, "fp32"), ("4-bit", quantized, "bf16")))
    for tp, (label, source, dtype) in ways:
        served = job(source, f"serve.mesh.tp={tp}", f"serve.dtype={dtype}")
        predictions = planned(served.recipe, device, tp, options.requests)
        with ExitStack() as opened:
            ranks = opened.enter_context(closing(Ranks(WORKER, served)))
            times: dict[int, list[float]] = {count: [] for count in options.requests}
            for _ in range(options.repeat):
                for count in options.requests:
                    times[count].append(measured(ranks, count, options.steps))
        for count, seconds in times.items():
            ratio = predictions[count] / statistics.median(seconds)
            worst = max(worst, abs(ratio - 1))
            record.rows.append({
                "tp": tp, "weights": label, "requests": count, "predicted_s": predictions[count],
                "measured_s": statistics.median(seconds), "all_measured_s": seconds, "ratio": ratio,
            })  # fmt: skip
    return worst


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", type=Path)
    parser.add_argument("--requests", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 64])
    parser.add_argument("--tp", type=lambda text: [int(n) for n in text.split(",")], default=[1])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    record = Record(f"plan_serving_{torch.backends.cpu.get_cpu_capability().lower()}", quiet=options.json)
    with tempfile.TemporaryDirectory() as folder:
        worst = compare(options, Path(folder), record)
    record.say(f"{'tp':<4}{'weights':<9}{'requests':>9}{'predicted ms':>14}{'measured ms':>13}{'ratio':>7}")
    for row in record.rows:
        record.say(
            f"{row['tp']:<4}{row['weights']:<9}{row['requests']:>9}{1e3 * row['predicted_s']:>14.1f}"
            f"{1e3 * row['measured_s']:>13.1f}{row['ratio']:>7.2f}"
        )
        record.figure(f"tp-{row['tp']}-{row['weights']}.{row['requests']}", row["ratio"], "times")
    record.close(write=options.record, as_json=options.json)
    sys.exit(int(worst > WITHIN))


if __name__ == "__main__":
    main()
