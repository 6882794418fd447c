"""Times of collectives and messages between the workers of one machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tpshard.devices.measuring.clock import FRESH_BYTES, Clock, new_memory
from tpshard.parallelism.runtime import gloo

COMM_BYTES = (64, 1 << 16, 1 << 20, 1 << 22)
MESSAGE_BYTES = 1 << 17
PIECES = 12
"""Units of computation before some of the collectives; the others follow one unit."""
MESSAGES, MESSAGE_PIECES = 16, 8
"""Messages of one timing, and units of computation for each."""
funcol = torch.ops._c10d_functional


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
