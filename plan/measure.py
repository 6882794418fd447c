"""`tpshard doctor --measure`: the constants of the machine it runs on, fitted into a dated device file.

On a CPU: as many processes as there are cores measure matrix products, attention, memory and bare operations at the
same time, so that what they share is shared; two and four processes measure gloo. On a GPU the device is measured and
its links are taken from the shipped file of its kind.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tpshard.recipes.diagnostic import Exit, Mistakes


@dataclass(frozen=True)
class Fit:
    """Least squares of seconds = fixed + amount / rate."""

    fixed_s: float
    rate: float
    error: float
    """Mean absolute error, as a share of the measured seconds."""


def fit(points: Sequence[tuple[float, float]]) -> Fit:
    """Fits (amount, seconds) pairs; relative errors weigh alike, or the largest point would decide alone."""
    rows = [(1 / s, a / s) for a, s in points]
    a11 = sum(x * x for x, _ in rows)
    a12 = sum(x * y for x, y in rows)
    a22 = sum(y * y for _, y in rows)
    b1, b2 = sum(x for x, _ in rows), sum(y for _, y in rows)
    determinant = a11 * a22 - a12 * a12
    fixed = (b1 * a22 - b2 * a12) / determinant if determinant > 1e-30 * a11 * a22 else 0.0
    if fixed < 0 or not math.isfinite(fixed):
        fixed = 0.0
    slope = (b2 - fixed * a12) / a22
    if slope <= 0:
        slope = min(s / a for a, s in points)
    error = sum(abs((fixed + a * slope) / s - 1) for a, s in points) / len(points)
    return Fit(fixed, 1 / slope, error)


def measure(say: Callable[[str], None] | None = None, *, name: str = "", today: str = "") -> str:
    """Text of a device file for this machine. `say` gets a line per stage. Takes about half a minute.

    Raises `Mistakes` (exit 5) where the processes of a measurement do not come up.
    """
    import torch

    tell = say or (lambda _: None)
    today = today or datetime.date.today().isoformat()
    if torch.cuda.is_available():
        from tpshard.plan.measure_gpu import measure_gpu

        return measure_gpu(tell, name, today)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        tell(f"computing: {cores} process(es) at once")
        alone = _run(Path(folder), cores, cores)
        tell("communicating: 2 processes")
        two = alone if cores == 2 else _run(Path(folder), 2, cores)
        tell("communicating: 4 processes")
        four = _run(Path(folder), 4, cores)
    return _file(name or "measured-cpu", today, cores, alone, two, four)


def _run(folder: Path, world: int, cores: int) -> list[dict[str, Any]]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores // world)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "tpshard.plan.measure_worker", str(folder)]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(cores)], env=environment, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    wrong = ""
    try:
        for worker in workers:
            _, said = worker.communicate(timeout=300)
            if worker.returncode:
                wrong = said.strip().splitlines()[-1] if said.strip() else f"exit code {worker.returncode}"
    except subprocess.TimeoutExpired:
        wrong = "no answer for five minutes"
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    if wrong:
        raise Mistakes.one(f"the measurement with {world} processes failed", exit=Exit.MACHINE, why=wrong)
    return [json.loads((folder / f"result-{world}-{rank}.json").read_text()) for rank in range(world)]


def _file(
    name: str, today: str, cores: int, alone: list[dict[str, Any]], two: list[dict[str, Any]],
    four: list[dict[str, Any]],
) -> str:  # fmt: skip
    n = len(alone)
    computed = [entry["compute"] for entry in alone]

    def gather(key: str) -> list[tuple[float, float]]:
        return [(row[-2], row[-1]) for entry in computed for row in entry[key]]

    by_dtype = {
        short: fit([(row[1], row[2]) for entry in computed for row in entry["matmul"] if row[0] == long])
        for short, long in (("fp32", "float32"), ("bf16", "bfloat16"))
    }
    stream = fit(gather("stream"))
    rates = {dtype: found.rate * n for dtype, found in by_dtype.items()}
    attention = [entry["attention"][0] / entry["attention"][1] * n / rates["fp32"] for entry in computed]
    backward = [e["attention_backward"][0] / e["attention_backward"][1] * n / rates["fp32"] for e in computed]
    op_s = sum(entry["op_s"] for entry in computed) / n
    hop, rate = _network(two, 2)
    crowded, rate_four = _network(four, 4)
    slow = sum(entry["slowdown"] for entry in (*two, *four)) / (len(two) + len(four))
    memory = psutil.virtual_memory().total
    error = sum(found.error for found in by_dtype.values()) / len(by_dtype)
    said = f"measured {today}"
    return f"""# {platform.processor() or platform.machine()}, {cores} core(s); written by `tpshard doctor --measure`.
# `across` was measured over loopback too: put your network's numbers there.
schema: 1
name: {name}
kind: cpu
backend: gloo
measured: {today}
memory: {memory // 2**20} MiB
memory_bandwidth: {stream.rate * n / 1e9:.4g} GB/s
rates: {{fp32: {rates['fp32'] / 1e9:.4g} GFLOP/s, bf16: {rates['bf16'] / 1e9:.4g} GFLOP/s}}
host:
  devices: 1024
  cores: {cores}
  inside: {{bandwidth: {min(rate * 2, rate_four * 4) / 1e9:.4g} GB/s, latency: {hop * 1e6:.4g} us, """ + (
        f"""efficiency: 1.0, slowdown: {min(slow, 0.9):.3g}, shared: true, crowded: {crowded * 1e6:.4g} us}}
  across: {{bandwidth: {rate * 2 / 1e9:.4g} GB/s, latency: {hop * 1e6:.4g} us, shared: true}}
constants: {{matmul: 1.0, attention: {_share(attention)}, attention_backward: {_share(backward)}, streaming: 1.0, """
        + f"""op: {op_s * 4e6:.3g} us, eager_op: {op_s * 8e6:.3g} us, issue: {hop * 2e5:.3g} us, reserved: 1.0}}
fitted:
  matmul: "{said}, products of 10^8 to 2x10^9 FLOPs, mean error {100 * error:.0f}%"
  streaming: "{said}, pointwise, reductions and transposes of 1 to 16 MB, mean error {100 * stream.error:.0f}%"
  attention: "{said}, 4 sequences of 256, 8 heads of 32"
  inside: "{said}, gloo with 2 and 4 processes"
"""
    )


def _share(values: Sequence[float]) -> str:
    return f"{min(1.0, max(0.005, sum(values) / len(values))):.3g}"


def _network(results: list[dict[str, Any]], world: int) -> tuple[float, float]:
    """(seconds of one hop, bytes/s that one device sends), from all-gathers, all-reduces and all-to-alls."""
    points: list[tuple[float, float]] = []
    hops: list[float] = []
    for entry in results:
        for kind, rounds in (("all_gather", 1), ("all_reduce", 2), ("all_to_all", 1)):
            rows = entry["comm"][kind]
            hops.append(rows[0][1] / (rounds * (world - 1)))
            points += [(rounds * b * (world - 1) / world, s) for b, s in rows if b > 1 << 18]
    return sorted(hops)[len(hops) // 2], fit(points).rate
