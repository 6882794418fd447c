"""One process of `doctor --measure`: times computation, memory and communication, and writes the seconds as JSON.

All processes of a crowd run the same part at the same time, with as many threads as the launcher would give them.
Crowds take turns at every part, and all parts are repeated, so that slow periods of the machine affect them alike. The
parts come from no recipe: matrix products, attention and a block of small operations in typical shapes, run like a
program.
"""

from __future__ import annotations

import ctypes
import json
import mmap
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
from tpshard.devices.measuring.measure_blocks import blocks
from tpshard.kernels import linear
from tpshard.kernels.attention import attention
from tpshard.kernels.dtypes import dtype_name
from tpshard.kernels.quantized import int4
from tpshard.kernels.quantized.quantized import Quantized, group_index
from tpshard.parallelism.rules.table import entry_of
from tpshard.parallelism.runtime import gloo
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
FRESH_BYTES = 1 << 24
STORED_BYTES = 1 << 28
"""Bytes of the values that are read from memory: more than caches hold."""
COMM_BYTES = (64, 1 << 16, 1 << 20, 1 << 22)
MESSAGE_BYTES = 1 << 17
MESSAGES, MESSAGE_PIECES = 16, 8
"""Messages of one timing, and units of computation for each."""
PIECES = 12
"""Units of computation before some of the collectives; the others follow one unit."""
LEAST_S = 0.04
aten, funcol = torch.ops.aten, torch.ops._c10d_functional


class Clock:
    """Measures the seconds of a call in one process of a crowd.

    A process with one thread is timed by its own CPU time, times the number of processes per core, so that programs
    outside of the crowd do not count. Several threads are timed by the wall clock.
    """

    def __init__(self, threads: int, turns: float):
        self.read, self.turns = (time.process_time, turns) if threads == 1 else (time.perf_counter, 1.0)
        self.share = turns / threads
        """Wall seconds per CPU second, if the process's threads divide the work."""

    def seconds(self, run: Callable[[], object], least_s: float = LEAST_S) -> float:
        """Mean seconds of a call, without the first and the slowest tenth of calls, over at least `least_s` in all.

        A step is a sum of operations, so the mean is right: a median would ignore delays that only some of them have.
        """
        run()
        samples: list[float] = []
        end = self.read() + least_s
        while (begun := self.read()) < end or len(samples) < 3:
            run()
            samples.append(self.read() - begun)
        return self._mean(samples)

    def _mean(self, samples: list[float]) -> float:
        fastest = sorted(samples)[: len(samples) * 9 // 10]
        return sum(fastest) / len(fastest) * self.turns

    def behind(self, run: Callable[[int], object], before: Callable[[int], object] = lambda i: None) -> float:
        """Mean seconds of `run(i)`, without the slowest tenth; `before(i)` runs untimed before each call."""
        samples = []
        for i in range(100):
            before(i)
            begun = self.read()
            run(i)
            samples.append(self.read() - begun)
        return self._mean(samples)


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


def new_memory(size: int) -> Tensor:
    """A float tensor of `size` bytes in newly mapped pages, which are returned to the system when it is freed."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.float32)


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
def communications(crowd: int, cores: int) -> Callable[[Clock], list[list[Any]]]:
    """Measures collectives as a program runs them, in pairs and over all of a crowd, each after some computation.

    Returns (kind, members, bytes of the buffer, seconds of the computation, seconds, share of the host's cores kept
    busy). The seconds include waiting for late members. Some collectives follow much computation: the longer ranks
    compute, the further apart they arrive. With more processes than cores, ranks also compute while others wait; then
    the time is the wall time beyond the turns of the computation. Every rank must call this, in the crowd or not.
    """
    rank, turns = dist.get_rank(), max(1.0, crowd / cores)
    cases: list[tuple[list[Any], int, Callable[[Tensor], Tensor], list[Tensor]]] = []
    a, b = torch.randn(2048, 128), torch.randn(128, 384)

    def mean_seconds(run: Callable[[Tensor], object], pieces: int, buffers: list[Tensor]) -> tuple[float, float]:
        """Mean seconds of a computation and the collective after it: in wall time, and in CPU time of this process."""
        begun, own = time.perf_counter(), time.process_time()
        for buffer in buffers:
            for _ in range(pieces):
                torch.mm(a, b)
                new_memory(FRESH_BYTES // 64).fill_(1.0)
            run(buffer)
        return (time.perf_counter() - begun) / len(buffers), (time.process_time() - own) / len(buffers)

    for members in sorted({2, crowd} - {1}):
        # groups of one size run at the same time, like the groups of a mesh axis
        groups = [dist.new_group(list(range(i, i + members))) for i in range(0, crowd - members + 1, members)]
        if crowd == 1 or rank >= len(groups) * members:
            continue
        for size in COMM_BYTES:
            n = max(crowd, size // 4 // crowd * crowd)
            buffers = [torch.ones(n) for _ in range(8)]
            for kind, run in _collectives(groups[rank // members].group_name, members).items():
                cases.append(([kind, members, 4 * n], 1, run, buffers))
                if members == crowd and size in COMM_BYTES[::2]:
                    cases.append(([kind, members, 4 * n], PIECES, run, buffers[:4]))

    def measure(_: Clock) -> list[list[Any]]:
        rows = []
        for case, pieces, run, buffers in cases:
            (wall, own), (wall_with, own_with) = (mean_seconds(each, pieces, buffers) for each in (lambda _: None, run))
            computed = own * turns if turns > 1 else wall
            seconds = max(1e-6, wall_with - computed)
            rows.append([*case, computed, seconds, min(1.0, max(0.0, own_with - own) * turns / seconds)])
        return rows

    return measure


def messages(crowd: int) -> Callable[[Clock], list[float]]:
    """Measures the seconds of a core that one message to another process and one from it take, in pairs of processes.

    A process computes while its messages travel, as a stage of a pipeline does. The seconds include the work of the
    library's own threads, whose data has left the caches.
    """
    rank = dist.get_rank()
    a, b = torch.randn(128, 256), torch.randn(256, 1024)
    sent, received = torch.ones(MESSAGE_BYTES // 4), torch.empty(MESSAGE_BYTES // 4)

    def core_seconds(peer: int | None) -> float:
        start = time.process_time()
        for _ in range(MESSAGES):
            works: list[Any] = [] if peer is None else [dist.irecv(received, peer), dist.isend(sent, peer)]
            for _ in range(MESSAGE_PIECES):
                torch.mm(a, b)
            for work in works:
                work.wait()
        return (time.process_time() - start) / MESSAGES

    def measure(_: Clock) -> list[float]:
        peer = rank ^ 1
        return [core_seconds(peer) - core_seconds(None) for _ in range(4)] if peer < crowd else []

    return measure


def _collectives(group: str, members: int) -> dict[str, Callable[[Tensor], Tensor]]:
    wait = funcol.wait_tensor.default

    def all_reduce(x: Tensor) -> Tensor:
        return wait(funcol.all_reduce.default(x, "sum", group))

    def all_gather(x: Tensor) -> Tensor:
        return wait(gloo.all_gather(x[: x.numel() // members], members, group))

    def all_to_all(x: Tensor) -> Tensor:
        pieces = [x.numel() // members] * members
        return wait(funcol.all_to_all_single.default(x, pieces, pieces, group))

    return {"all_reduce": all_reduce, "all_gather": all_gather, "all_to_all": all_to_all}


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
