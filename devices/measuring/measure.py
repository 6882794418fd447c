"""`tpshard doctor --measure`: measures this machine and fits its constants into a dated device file.

On a CPU, groups of one, two and four processes (and one per core) measure matrix products, attention, streams of
operations and gloo. The processes of a group ("crowd") run at the same time, so that the constants include their
contention. Crowds take turns at every part, and all is repeated; the median counts, because a machine shared with
others is slow now and then. On a GPU the device is measured; its links come from the shipped file of its kind.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tpshard.diagnostics.diagnostic import Exit, Mistakes, plural
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.pricing.cost import Crowd, Device, ServingOverhead, collective, wire_bytes
from tpshard.parallelism.pricing.network import Link, Topology
from tpshard.parallelism.runtime.cores import usable_cores
from tpshard.parallelism.runtime.heap import in_huge_pages

Result = dict[str, Any]
"""The results of one process of `measure_worker`."""


@dataclass(frozen=True)
class Fit:
    """The least-squares fit of seconds = sum of amount x cost."""

    costs: tuple[float, ...]
    """Seconds per unit of each amount, none negative."""
    error: float
    """Mean absolute error relative to the measured seconds."""


def fit(rows: Sequence[Sequence[float]]) -> Fit:
    """Finds the costs for which amount * cost + ... is closest to the seconds of rows (amount, ..., seconds).

    Minimizes relative errors, so that long measurements do not dominate. No cost is negative: every subset of the costs
    is fitted with the others at 0, and the best fit without a negative cost is used.
    """
    table = np.array(rows, dtype=float)
    scaled, ones = table[:, :-1] / table[:, -1:], np.ones(len(table))
    count = scaled.shape[1]
    best, best_left = np.zeros(count), np.inf
    for size in range(1, count + 1):
        for subset in combinations(range(count), size):
            costs, *_ = np.linalg.lstsq(scaled[:, subset], ones, rcond=None)
            left = float(((scaled[:, subset] @ costs - ones) ** 2).sum())
            if (costs >= 0).all() and left < best_left:
                best, best_left = np.zeros(count), left
                best[list(subset)] = costs
    error = float(np.abs(scaled @ best - ones).mean())
    return Fit(tuple(float(cost) for cost in best), error)


def typical(samples: Sequence[Any]) -> Any:
    """The element-wise median of several results of one structure."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: typical([one[key] for one in samples]) for key in first}
    if isinstance(first, list):
        return [typical(parts) for parts in zip(*samples, strict=True)]
    return first if all(one == first for one in samples) else float(np.median(samples))


@dataclass(frozen=True)
class Computing:
    """The compute constants of one process of a crowd."""

    rates: dict[str, float]
    """FLOP/s of matrix products by dtype."""
    packing: float
    """Bytes/s of reading a product's operands and writing its result, in addition to its FLOPs."""
    softmax: float
    attention: float
    """FLOP/s of attention, where each FLOP counts 1 + softmax / head size times."""
    attention_backward: float
    streaming: float
    """Bytes/s of pointwise operations and reductions."""
    exponential: float
    """Bytes that could be streamed during one exponential."""
    growth: float
    """Bytes/s at which the system provides new memory."""
    cold_bandwidth: float
    """Bytes/s at which values are read from memory."""
    cold_overhead: float
    """The overhead of operations whose code has left the near caches, as a multiple."""
    op_s: float
    view_s: float
    products: dict[str, dict[int, float]]
    """Seconds per weight of a server's products, by layout and rows."""
    step_s: float
    """Seconds of a training step besides its operations, for a process with a core of its own."""
    errors: dict[str, float]


def computing(results: Sequence[Result]) -> Computing:
    """The compute constants of one process, from the rows of all processes of a crowd."""
    op_s, view_s, warm_s, cold_s, exponential_s, fresh_s, stored_s = (
        max(0.0, _middle(t for entry in results for t in entry["overhead"][key]))
        for key in ("op", "view", "warm", "cold", "exponential", "fresh", "stored")
    )
    # The time of exponentials, measured separately, is subtracted; at least a fifth of a block's time is left. The
    # overhead of an operation is fitted again: in a small block, unlike in `op_s`, its code is still in the caches.
    rows = [row for entry in results for row in entry["stream"]]
    streams = fit([(ops, moved, max(s - exps * exponential_s, 0.2 * s)) for ops, moved, exps, s in rows])
    per_byte = max(streams.costs[1], 1e-13)
    products = fit([row[1:] for entry in results for row in entry["matmul"] if row[0] == "float32"])
    per_flop, packing = products.costs
    half = fit([(row[1], row[3]) for entry in results for row in entry["matmul"] if row[0] == "bfloat16"])
    # subtracts the operations that prepare attention, which the cost model prices by their overhead
    timed = [
        [
            (flops, d, max(s - (calls - 1) * op_s, 0.2 * s))
            for entry in results
            for flops, d, calls, s in entry["attention"][way]
        ]
        for way in (0, 1)
    ]
    ahead, back = (fit([(flops, flops / d, s) for flops, d, s in way]) for way in timed)
    # one number for forward and backward: the cost of their softmax, in dims of a head
    softmax = (ahead.costs[1] + back.costs[1]) / max(ahead.costs[0] + back.costs[0], 1e-30)
    rates = [fit([(flops * (1 + softmax / d), s) for flops, d, s in way]) for way in timed]
    return Computing(
        rates={"fp32": 1 / per_flop, "bf16": 1 / half.costs[0]},
        packing=1 / max(packing, 1e-3 * per_byte),
        softmax=softmax,
        attention=1 / rates[0].costs[0],
        attention_backward=1 / rates[1].costs[0],
        streaming=1 / per_byte,
        exponential=exponential_s / per_byte,
        growth=1 / max(fresh_s, 1e-13),
        cold_bandwidth=1 / max(stored_s, 1e-13),
        cold_overhead=max(1.0, cold_s / max(warm_s, 1e-9)),
        op_s=op_s,
        view_s=view_s,
        products=_served(results),
        step_s=max(0.0, _middle(t for entry in results for t in entry["loop"])),
        errors={
            "matmul": products.error, "attention": (rates[0].error + rates[1].error) / 2, "streaming": streams.error
        },
    )  # fmt: skip


def _served(results: Sequence[Result]) -> dict[str, dict[int, float]]:
    """The median of the processes' seconds per weight, by layout and rows."""
    each: dict[tuple[str, int], list[float]] = {}
    for entry in results:
        for layout, rows, seconds in entry["served"]:
            each.setdefault((layout, int(rows)), []).append(seconds)
    products: dict[str, dict[int, float]] = {}
    for (layout, rows), samples in each.items():
        products.setdefault(layout, {})[rows] = _middle(samples)
    return products


def _middle(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def communicating(results: Sequence[Result], local: float) -> tuple[Crowd, float]:
    """The communication constants of one process while all of a crowd communicate, and their mean relative error.

    local: bytes/s of a local sum, which the cost model counts separately.
    """
    rows, busy = [], []
    # takes the mean over the members of each collective, since waiting for another member is not latency
    every: dict[tuple[Any, ...], list[list[float]]] = {}
    for entry in results:
        for i, (kind, members, buffer, *sample) in enumerate(entry["comm"]):
            every.setdefault((kind, members, buffer, i), []).append(sample)
    least = min((sample[0] for members in every.values() for sample in members), default=0.0)
    for (kind, members, buffer, _), samples in every.items():
        computed, seconds, share = (sum(part) / len(samples) for part in zip(*samples, strict=True))
        summed = buffer / local if kind == "all_reduce" else 0.0
        hops, sent = _hops(kind, members), wire_bytes(kind, buffer, members, "gloo")
        rows.append((1.0, hops, sent, computed, max(seconds - summed, 0.2 * seconds)))
        if buffer >= 1 << 20 and computed < 3 * least:
            busy.append(share)
    fitted = fit(rows)
    skew, hop, byte, spread = fitted.costs
    message_s = max(0.0, _middle(t for entry in results for t in entry["message"]))
    crowd = Crowd(
        # a device file has twice that, of at most 10 TB/s
        bandwidth=1 / max(byte, 1e-12), latency_s=hop, skew_s=skew, spread=min(1.0, spread),
        slowdown=min(0.95, _middle(busy)), message_s=message_s,
    )  # fmt: skip
    return crowd, fitted.error


def _hops(kind: str, members: int) -> float:
    """The number of hops that the cost model counts: the cost of a collective if a hop takes 1 s and bytes nothing."""
    link = Link(bandwidth=1e30, latency_s=1.0)
    unit = Device("unit", "gpu", "gloo", 1, 0, 1e30, {"fp32": 1.0}, members, link, link)
    mesh = Mesh({"x": members})
    return collective(unit, Topology(mesh, members), kind, (mesh.axis("x"),), 64).seconds


def measure(tell: Callable[[str], None], *, name: str, measure_server: Callable[[str], ServingOverhead]) -> str:
    """Measures this machine, and returns a device file as text; takes three minutes on two cores. tell: gets progress.

    measure_server: measures a server on this machine's CPU, given the file without its result.

    Raises `Mistakes` (exit 5) if the measuring processes do not start.
    """
    import torch

    today = datetime.date.today().isoformat()
    if torch.cuda.is_available():
        from tpshard.devices.measuring.measure_gpu import measure_gpu

        return measure_gpu(tell, name, today)
    cores = max(1, int(usable_cores()))
    crowds = sorted({1, 2, 4, min(cores, MOST)})
    many = ", ".join(map(str, crowds))
    tell(f"{many} processes on {plural(cores, 'core')} compute, move and send, {ROUNDS} times ...")
    results = workers(crowds, cores, tell)
    written = partial(device_file, name, today, cores, psutil.virtual_memory().total, results)
    tell("a server with 1 and 8 clients ...")
    return written(measure_server(written()))


ROUNDS = 5
"""Repetitions of all measurements: a machine shared with others is slow now and then, for seconds or more."""
MOST = 16
"""The largest crowd; more processes add nothing to the host's rates."""
LIMIT_S = 600
"""Seconds after which a measurement is aborted."""


def workers(crowds: list[int], cores: int, tell: Callable[[str], None]) -> dict[int, list[Result]]:
    """Runs the measuring processes; returns for each crowd the results of its processes.

    The processes of the largest crowd serve all crowds. `tell` receives a line per round.
    """
    environment = {**os.environ, **in_huge_pages(os.environ), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as files:
        command = [sys.executable, "-P", "-m", "tpshard.devices.measuring.measure_worker", folder]
        numbers = [str(n) for n in (cores, ROUNDS, *crowds)]
        errors = [files.enter_context(Path(folder, str(rank)).open("w+")) for rank in range(max(crowds))]
        processes = [
            subprocess.Popen(
                [*command, str(rank), *numbers], env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE, stderr=errors[rank], text=True,
            )
            for rank in range(max(crowds))
        ]  # fmt: skip

        def end() -> None:
            for process in processes:
                process.kill()

        late = threading.Timer(LIMIT_S, end)
        late.start()
        begun = time.monotonic()
        try:
            assert processes[0].stdout is not None
            for line in processes[0].stdout:
                tell(f"  {line.strip()} of {ROUNDS}, {time.monotonic() - begun:.0f} s")
            ended = [process.wait() for process in processes]
        finally:
            late.cancel()
            end()
            for process in processes:
                process.wait()
        for code, error in zip(ended, errors, strict=True):
            if code:
                error.seek(0)
                lines = error.read().strip().splitlines()
                why = lines[-1] if lines else f"exit code {code}"
                message = f"the measurement with {len(processes)} processes failed"
                raise Mistakes.one(message, exit=Exit.MACHINE, why=why, fix="close other programs, retry")
        each = [json.loads(Path(folder, f"result-{rank}.json").read_text()) for rank in range(len(processes))]
    return {n: [typical(result[str(n)]) for result in each[:n]] for n in crowds}


def device_file(
    name: str, today: str, cores: int, memory: int, results_of: dict[int, list[Result]],
    serving: ServingOverhead | None = None,
) -> str:  # fmt: skip
    """The text of a device file, from the measurements of each crowd (processes at once) and perhaps of a server.

    The rates are those of the largest crowd with a core per process. Rates of other crowds are written as shares of
    these.
    """
    each = {n: computing(results) for n, results in results_of.items()}
    sends = {n: communicating(results, each[n].streaming) for n, results in results_of.items() if n > 1}
    base = max(n for n in each if n <= cores)
    own, (near, error) = each[base], sends[min(n for n in sends if n >= min(base, 2))]
    rates = {dtype: rate * base for dtype, rate in own.rates.items()}
    memory_rate = own.streaming * base
    op_s, view_s = own.op_s, own.view_s

    def crowd(n: int) -> str:
        one = each[n]
        parts = {
            "compute": f"{one.rates['fp32'] * n / rates['fp32']:.3g}",
            "memory": f"{one.streaming * n / memory_rate:.3g}",
            "growth": f"{one.growth * n / (own.growth * base):.3g}",
            "overhead": f"{(one.op_s + one.view_s) / max(op_s + view_s, 1e-9):.3g}",
        }
        if n in sends:
            sent, _ = sends[n]
            parts |= {
                "bandwidth": f"{sent.bandwidth / 1e9:.4g} GB/s", "latency": f"{sent.latency_s * 1e6:.4g} us",
                "skew": f"{sent.skew_s * 1e6:.4g} us", "spread": f"{sent.spread:.3g}",
                "slowdown": f"{sent.slowdown:.3g}", "message": f"{sent.message_s * 1e6:.4g} us",
            }  # fmt: skip
        return f"    {n}: {{{', '.join(f'{key}: {value}' for key, value in parts.items())}}}"

    products = "\n".join(
        f"    {layout}: {{{', '.join(f'{rows}: {s / base * 1e9:.4g} ns' for rows, s in by_rows.items())}}}"
        for layout, by_rows in own.products.items()
    )
    constants = {
        "matmul": "1.0", "packing": f"{own.packing / own.streaming:.3g}",
        "attention": _share(own.attention / own.rates["fp32"]),
        "attention_backward": _share(own.attention_backward / own.rates["fp32"]), "softmax": f"{own.softmax:.3g}",
        "streaming": "1.0", "exponential": f"{own.exponential:.3g}", "op": f"{op_s * 5e5:.3g} us",
        "eager_op": f"{op_s * 1e6:.3g} us",
        "growth": f"{own.growth * base / 1e9:.4g} GB/s", "view": f"{view_s * 1e6:.3g} us",
        "cold_bandwidth": f"{own.cold_bandwidth * base / 1e9:.4g} GB/s", "cold_overhead": f"{own.cold_overhead:.3g}",
        "issue": "0 us", "step": f"{own.step_s * 1e3:.3g} ms",
    }  # fmt: skip
    fitted_on = f"measured {today}"
    note = ""
    if serving is not None:
        for key, value in (("step", serving.step_s), ("token", serving.token_s), ("request", serving.request_s)):
            constants[f"serve_{key}"] = f"{value * 1e3:.3g} ms"
        note = f'  serving: "{fitted_on}, a server of one narrow layer on this machine with 1 and 8 clients"\n'
    errors = {key: f"mean error {100 * value:.0f}%" for key, value in own.errors.items()}
    link = f"bandwidth: {near.bandwidth * 2 / 1e9:.4g} GB/s, latency: {near.latency_s * 1e6:.4g} us"
    machine = f"{platform.processor() or platform.machine()}, {plural(cores, 'core')}"
    return f"""# {machine}; written by `tpshard doctor --measure`.
# `across` was measured over loopback too: put your network's numbers there.
schema: 1
name: {name}
kind: cpu
backend: gloo
measured: {today}
memory: {memory // 2**20} MiB
memory_bandwidth: {memory_rate / 1e9:.4g} GB/s
rates: {{fp32: {rates["fp32"] / 1e9:.4g} GFLOP/s, bf16: {rates["bf16"] / 1e9:.4g} GFLOP/s}}
host:
  devices: 1024
  cores: {cores}
  inside: {{{link}, efficiency: 1.0, slowdown: {near.slowdown:.3g}, shared: true}}
  across: {{{link}, efficiency: 1.0, slowdown: {near.slowdown:.3g}, shared: true}}
  products:  # seconds per weight of a server's products, by layout and rows
{products}
  crowds:  # what one of so many processes at once reaches: shares of an even part of the host's rates
{chr(10).join(crowd(n) for n in sorted(each))}
constants: {{{", ".join(f"{key}: {value}" for key, value in constants.items())}}}
fitted:
  matmul: "{fitted_on}, products of 10^7 to 2x10^9 FLOPs, {errors["matmul"]}"
  streaming: "{fitted_on}, blocks of pointwise operations and sums on 0.25 to 8 MB, {errors["streaming"]}"
  attention: "{fitted_on}, sequences of 256 and 512, heads of 16 to 128, {errors["attention"]}"
  inside: "{fitted_on}, gloo with {" and ".join(str(n) for n in sends)} processes, mean error {100 * error:.0f}%"
{note}"""


def _share(value: float) -> str:
    return f"{min(1.0, max(0.005, value)):.3g}"
