"""One process of `doctor --measure`: times computation, memory and communication, and writes the seconds as JSON.

All processes of a crowd run the same part at the same time, with as many threads as the launcher would give them.
Crowds take turns at every part, and all parts are repeated, so that slow periods of the machine affect them alike. The
parts come from no recipe: matrix products, attention and a block of small operations in typical shapes, run like a
program.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import cycle
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tpshard.devices.measuring.clock import FRESH_BYTES, LEAST_S, Clock, new_memory
from tpshard.devices.measuring.measure_blocks import blocks
from tpshard.devices.measuring.measure_links import communications, messages
from tpshard.kernels import linear
from tpshard.kernels.attention import attention
from tpshard.kernels.dtypes import dtype_name
from tpshard.kernels.quantized import int4
from tpshard.kernels.quantized.quantized import Quantized, group_index
from tpshard.parallelism.rules.table import entry_of
from tpshard.parallelism.runtime.heap import keep_freed_memory

MATMULS = {
    torch.float32: (
        (2048, 128, 64), (2048, 128, 384), (1024, 512, 512), (1024, 512, 1536), (1024, 1024, 1024),
        (8, 512, 1536), (64, 512, 1536),  # a server's few rows
    ),
    torch.bfloat16: ((256, 64, 128), (256, 128, 256)),  # a CPU without instructions for it is a hundred times slower
}  # fmt: skip
HEADS = ((8, 256, 8, 16), (4, 256, 8, 32), (2, 512, 8, 64), (1, 512, 8, 128))
"""(batch, sequence, heads, head size)."""
SERVED = ((2816, 1024), (1024, 2816), (1024, 1024))
"""(outputs, inputs) of a server's products."""
SERVED_BYTES = 96 << 20
"""Bytes of the fp32 weights of one pass, more than a core's share of the caches."""
ELEMENTS = (1 << 16, 1 << 18, 1 << 20, 1 << 21)
STORED_BYTES = 1 << 28
"""Bytes of the values that are read from memory: more than caches hold."""
aten = torch.ops.aten


# ---- computing -----------------------------------------------------------------------------------------------
# Each function allocates its tensors once, and returns the function that measures with the clock of a crowd.
def products() -> Callable[[Clock], list[list[float | str]]]:
    """Measures matrix products, plain and with either operand transposed: (dtype, FLOPs, bytes moved, seconds)."""
    cases: list[tuple[list[float | str], Callable[[], Tensor]]] = []
    for dtype, shapes in MATMULS.items():
        name = dtype_name(dtype)
        for m, k, n in shapes:
            # operands in turn, so that not all are in the nearest cache
            lefts = [torch.randn(m, k, dtype=dtype) for _ in range(4)]
            rights = [torch.randn(k, n, dtype=dtype) for _ in range(4)]
            for left_turned, right_turned in ((False, False), (False, True), (True, False)):
                a = [x.t().contiguous().t() for x in lefts] if left_turned else lefts
                b = [x.t().contiguous().t() for x in rights] if right_turned else rights
                amounts: list[float | str] = [name, 2 * m * k * n, dtype.itemsize * (m * k + k * n + m * n)]
                cases.append((amounts, partial(_next, cycle(zip(a, b)))))
    return lambda clock: [[*amounts, clock.seconds(run)] for amounts, run in cases]


def _next(pairs: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.mm(*next(pairs))


def served_products() -> Callable[[Clock], list[list[float | str]]]:
    """Measures a server's products as its programs run them: (layout of the weight, rows, seconds per weight).

    The weights are read in turn, from memory, as in a model. Layouts: see `cost.Cpu.products`.
    """
    dense = int4.agrees()
    cases: list[tuple[str, int, int, Callable[[], object]]] = []
    for layout, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("int4", torch.bfloat16),
                          ("parts", torch.bfloat16)):  # fmt: skip
        if (layout == "bf16" and linear.packed_dtype(dtype) != dtype) or (layout == "parts" and not dense):
            continue
        weights = _weights(layout)
        run = linear.fixed_rows_linear if layout in ("fp32", "bf16") else int4.parts_linear
        for rows in sorted(linear.TILES):
            many = rows >= int4.DENSE_ROWS
            if (layout == "parts" and not many) or (layout == "int4" and many and dense):
                continue
            operands = [(torch.randn(rows, inputs, dtype=dtype), weight) for inputs, weight in weights]
            count = len(weights) // len(SERVED) * sum(n * k for n, k in SERVED)
            cases.append((layout, rows, count, partial(_each, run, operands)))
    return lambda clock: [[layout, rows, clock.seconds(run) / count] for layout, rows, count, run in cases]


def _weights(layout: str) -> list[tuple[int, Any]]:
    """(inputs, weight) of about `SERVED_BYTES` in a layout, all shapes equally often."""
    weights: list[tuple[int, Any]] = []
    for n, k in SERVED:
        if layout in ("int4", "parts"):
            weights.append((k, int4.pack_parts(_quantized(n, k), dense=layout == "parts")))
        else:
            weights.append(
                (k, linear.pack(torch.randn(n, k).to(torch.bfloat16 if layout == "bf16" else torch.float32)))
            )
    size = sum(w.nbytes if isinstance(w, int4.Int4Parts) else w.numel() * w.itemsize for _, w in weights)
    return [(k, _copy(weight)) for k, weight in weights for _ in range(max(1, SERVED_BYTES // size))]


def _copy(weight: Any) -> Any:
    if isinstance(weight, Tensor):  # also one in a layout of the CPU's library
        return weight.clone()
    if isinstance(weight, int4.Int4Parts):
        return replace(weight, parts=tuple(map(_copy, weight.parts)))
    return replace(weight, codes=weight.codes.clone(), scales=weight.scales.clone())


def _quantized(outputs: int, inputs: int) -> Quantized:
    """A random weight of 4 bits in groups of 128 inputs."""
    codes, groups = torch.randint(16, (inputs, outputs), dtype=torch.uint8), inputs // 128
    zeros = torch.full((groups, outputs), 8, dtype=torch.uint8)
    return Quantized(codes, torch.rand(groups, outputs).half(), zeros, group_index(inputs, 128), 4)


def _each(run: Callable[..., Tensor], operands: list[Any]) -> None:
    for pair in operands:
        run(*pair)


def attentions() -> Callable[[Clock], tuple[list[list[float]], list[list[float]]]]:
    """Measures causal attention within documents, forward and backward.

    Returns (FLOPs, head size, operations of the library, seconds).
    """
    forward, backward = attention.ATTENTION, attention.ATTENTION_BACKWARD
    calls, back_calls = entry_of(forward).calls, entry_of(backward).calls
    cases = []
    for b, s, h, d in HEADS:
        q, kv, documents = torch.randn(b, s, h, d), torch.randn(b, s, h // 2, d), torch.zeros(b, s, dtype=torch.int64)
        o, lse = forward(q, kv, kv, documents, 0.2)
        ahead = partial(forward, q, kv, kv, documents, 0.2)
        cases.append((4 * b * h * s * s * d // 2, d, ahead, partial(backward, o, q, kv, kv, o, lse, documents, 0.2)))
    return lambda clock: (
        [[flops, d, calls, clock.seconds(ahead)] for flops, d, ahead, _ in cases],
        [[flops * 5 // 2, d, back_calls, clock.seconds(back)] for flops, d, _, back in cases],
    )


def streams() -> Callable[[Clock], list[list[float]]]:
    """Measures blocks of small operations in several sizes: (operations, bytes moved, exponentials, seconds)."""
    cases: list[tuple[list[float], Callable[[], object]]] = []
    for elements in ELEMENTS:
        tape, result = blocks(elements, max(1, min(16, (1 << 21) // elements)))
        cases.append(([tape.ops, tape.moved, tape.exponentials], partial(tape.module(result), *tape.inputs)))
    return lambda clock: [[*amounts, clock.seconds(run, 2 * LEAST_S)] for amounts, run in cases]


def overheads() -> Callable[[Clock], dict[str, list[float]]]:
    """Measures the seconds of a tiny operation, a view, an exponential, and a byte of new memory and of stored values.

    Small operations of several kinds are timed after each other (`warm`), and after products with
    `cost.EVICTING_BYTES` of weights (`cold`). An exponential is the time per element beyond an operation without one.
    New memory is the time of its first write beyond that of the second. Stored values are read from memory, not from a
    cache.
    """
    weights = [torch.randn(1536, 512) for _ in range(24)]
    rows, few = torch.rand(8, 512), [torch.rand(8, 512) for _ in range(2)]
    stored = torch.ones(STORED_BYTES // 4)
    small = [torch.rand(8, 16) for _ in range(512)]  # too many for the caches, like an optimizer's tensors
    kinds = (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default, aten.sub.Tensor)
    x = torch.rand(ELEMENTS[1]) - 1  # as after subtracting a maximum; overflowing values take several times as long
    pairs = ((torch.exp, torch.neg), (torch.nn.functional.silu, torch.relu))

    def op(i: int) -> None:
        a, b, kind = small[i % len(small)], small[(i + 7) % len(small)], kinds[i % len(kinds)]
        result = kind(a, b)
        aten.sqrt.default(result) if i % 2 else aten.sum.dim_IntList(result, [0])

    def view(i: int) -> None:
        aten.permute.default(aten.reshape.default(few[i % 2], [8, -1, 32, 16]), [0, 2, 1, 3])

    def several(i: int) -> None:
        a, b = small[i % len(small)], small[(i + 7) % len(small)]
        total = aten.add.Tensor(aten.mul.Tensor(a, b), aten.silu.default(a))
        aten.cat.default([aten.roll.default(total, [1], [1]), aten.div.Tensor(a, b)], 1)

    def evict(i: int) -> None:
        for weight in weights[4 * i % 24 : 4 * i % 24 + 4]:
            torch.mm(rows, weight.t())

    def fresh(clock: Clock) -> float:
        # by one thread: two that write to one new mapping delay each other, which a program's threads do not
        times = [time.thread_time()]
        values = new_memory(FRESH_BYTES)
        for _ in range(2):
            ctypes.memset(values.data_ptr(), 1, FRESH_BYTES)
            times.append(time.thread_time())
        del values
        return (time.thread_time() - times[0] - 2 * (times[2] - times[1])) * clock.share / FRESH_BYTES

    def measure(clock: Clock) -> dict[str, list[float]]:
        idle_s = clock.behind(lambda i: None)
        overhead_s = {
            "op": [(clock.behind(op) - idle_s) / 2], "view": [(clock.behind(view) - idle_s) / 2],
            "warm": [clock.behind(several) - idle_s], "cold": [clock.behind(several, evict) - idle_s],
            "stored": [clock.seconds(stored.sum) / STORED_BYTES],
        }  # fmt: skip
        pair_s = [[clock.seconds(partial(run, x)) for run in pair] for pair in pairs]
        overhead_s["exponential"] = [(exponential - plain) / x.numel() for exponential, plain in pair_s]
        return {**overhead_s, "fresh": [fresh(clock) for _ in range(5)]}

    return measure


def loops() -> Callable[[Clock], list[float]]:
    """Measures the wall seconds of a training step outside its program: reading ahead and writing metrics.

    The reading thread holds the interpreter's lock as long as it may.
    """
    larger, row = torch.rand(ELEMENTS[0]), json.dumps(dict.fromkeys(map(str, range(16)), 0.1)).encode()

    def reading() -> None:
        end = time.perf_counter() + sys.getswitchinterval()
        while time.perf_counter() < end:
            pass

    def seconds(ahead: Thread | None) -> float:
        begun = time.perf_counter()
        if ahead is not None:
            ahead.start()
        for _ in range(200):
            torch.mul(larger, 2.0)
        if ahead is not None:
            ahead.join()
            with open(os.devnull, "ab") as file:
                file.write(row)
        return time.perf_counter() - begun

    return lambda _: [seconds(Thread(target=reading)) - seconds(None) for _ in range(4)]


# ---- communicating -------------------------------------------------------------------------------------------


def main(folder: str, rank: int, cores: int, rounds: int, crowds: list[int]) -> None:
    """Measures with each crowd that includes this process, and writes {processes: a result per round}."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # names that newer torch deprecates
    world = max(crowds)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(Path(folder) / "store"), world), rank=rank, world_size=world,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    results: dict[int, list[dict[str, Any]]] = {crowd: [{} for _ in range(rounds)] for crowd in crowds if rank < crowd}
    torch.set_num_threads(1)
    keep_freed_memory()  # as in the processes of a run, so that no timing includes page faults
    with torch.no_grad():
        alike = {
            "matmul": products(), "served": served_products(),
            "attention": attentions(), "stream": streams(), "overhead": overheads(),
            "loop": loops(),
        }  # fmt: skip
        parts = {crowd: {**alike, "comm": communications(crowd, cores), "message": messages(crowd)} for crowd in crowds}
        for i in range(rounds):
            for name in (*alike, "comm", "message"):
                for crowd in crowds:
                    threads = max(1, cores // crowd)
                    dist.barrier()
                    if rank < crowd:
                        torch.set_num_threads(threads)
                        results[crowd][i][name] = parts[crowd][name](Clock(threads, max(1.0, crowd / cores)))
            if rank == 0:
                print(i + 1, flush=True)
    (Path(folder) / f"result-{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    rank, cores, rounds, *crowds = (int(text) for text in sys.argv[2:])
    main(sys.argv[1], rank, cores, rounds, crowds)
