"""One process of a measurement: what its share of the machine computes, moves and sends, written as JSON."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tpshard.kernels import attention

OPS = attention.__name__  # importing it registers torch.ops.tpshard.attention
MATMULS = ((1024, 128, 384), (1024, 384, 128), (2048, 512, 512), (1024, 1024, 1024))
COMM_BYTES = (64, 1 << 16, 1 << 20, 1 << 23)


def best(run: Callable[[], object], least_s: float = 0.15) -> float:
    """Median seconds of one call, over calls of at least `least_s` together."""
    run()
    taken: list[float] = []
    end = time.perf_counter() + least_s
    while time.perf_counter() < end or len(taken) < 5:
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2]


def compute() -> dict[str, Any]:
    """Seconds of matrix products, attention, pointwise operations and a bare operation, of this process."""
    out: dict[str, Any] = {"matmul": [], "stream": [], "attention": []}
    for dtype in (torch.float32, torch.bfloat16):
        for m, k, n in MATMULS:
            a, b = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
            taken = best(partial(torch.matmul, a, b), 0.08)
            out["matmul"].append([str(dtype).removeprefix("torch."), 2 * m * k * n, taken])
    for size in (1 << 18, 1 << 20, 1 << 22):
        x, y = torch.randn(size), torch.randn(size)
        rows = x.view(-1, 64)
        runs: list[tuple[int, Callable[[], object]]] = [
            (12 * size, partial(torch.add, x, y)),
            (12 * size, partial(torch.mul, x, y)),
            (8 * size, partial(torch.exp, x)),
            (8 * size, partial(torch.neg, x)),
            (4 * size, partial(torch.mean, rows, -1)),
            (8 * size, rows.t().contiguous),
        ]
        for moved, run in runs:
            out["stream"].append([moved, best(run, 0.04)])
    q, kv = torch.randn(4, 256, 8, 32), torch.randn(4, 256, 4, 32)
    forward = torch.ops.tpshard.attention
    o, lse = forward(q, kv, kv, None, 0.2)
    flops = 4 * 4 * 8 * 256 * 256 * 32 // 2
    out["attention"] = [flops, best(lambda: forward(q, kv, kv, None, 0.2), 0.1)]
    backward = torch.ops.tpshard.attention_backward
    out["attention_backward"] = [flops * 5 // 2, best(lambda: backward(o, q, kv, kv, o, lse, None, 0.2), 0.1)]
    small = torch.ones(8)
    out["op_s"] = best(lambda: [small + small for _ in range(100)]) / 100
    return out


def communicate() -> dict[str, list[list[float]]]:
    """Per collective: (bytes of the buffer, seconds), over all ranks of the default group."""
    world = dist.get_world_size()
    out: dict[str, list[list[float]]] = {"all_reduce": [], "all_gather": [], "reduce_scatter": [], "all_to_all": []}
    for size in COMM_BYTES:
        n = max(world, size // 4 // world * world)
        whole, part = torch.ones(n), torch.ones(n // world)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_gather": partial(dist.all_gather_into_tensor, whole, part),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
            "all_to_all": partial(dist.all_to_all_single, torch.empty_like(whole), whole),
        }
        for kind, run in calls.items():
            run()
            dist.barrier()
            times = 20 if size <= 1 << 16 else 6
            start = time.perf_counter()
            for _ in range(times):
                run()
            out[kind].append([4.0 * n, (time.perf_counter() - start) / times])
    return out


def slowdown() -> float:
    """Share of its computing rate that a process loses while a large all-gather runs."""
    world = dist.get_world_size()
    part, whole = torch.ones(1 << 21), torch.ones(world << 21)
    a = torch.randn(512, 512)

    def work() -> float:
        start = time.perf_counter()
        for _ in range(24):
            a @ a
        return time.perf_counter() - start

    work()
    dist.barrier()
    alone = work()
    dist.barrier()
    pending = dist.all_gather_into_tensor(whole, part, async_op=True)
    beside = work()
    overlapped = not pending.is_completed()
    pending.wait()
    return max(0.0, min(0.9, 1 - alone / beside)) if overlapped or beside > alone else 0.0


def main(folder: str, rank: int, world: int, cores: int) -> None:
    torch.set_num_threads(max(1, cores // world))
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(Path(folder) / f"store-{world}"), world), rank=rank, world_size=world,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    warnings.filterwarnings("ignore", category=FutureWarning)  # names that newer torch spells otherwise
    dist.barrier()
    found: dict[str, Any] = {"compute": compute()} if world <= cores else {}
    dist.barrier()
    if world > 1:
        found |= {"comm": communicate(), "slowdown": slowdown()}
    (Path(folder) / f"result-{world}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *(int(text) for text in sys.argv[2:5]))
