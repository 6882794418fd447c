"""One of the two ranks of `tpshard doctor`'s collective, run as a process that prints one line of JSON."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

SIZE = 1 << 20
"""fp32 numbers in the large message: 4 MiB."""


def measure(rank: int, store: str, backend: str) -> dict[str, float]:
    """Times all-reduces over two ranks: seconds of a small one, bytes/s of a large one. ValueError for a wrong sum."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    small, large = torch.ones(1, device=device), torch.full((SIZE,), float(rank + 1), device=device)
    dist.all_reduce(large)
    if not bool((large == 3).all()):
        raise ValueError(f"1 + 2 gave {float(large[0])}")
    times = {}
    for name, tensor in (("small", small), ("large", large)):
        best = float("inf")
        for _ in range(5):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            tensor[0].item()  # waits for the GPU
            best = min(best, time.perf_counter() - begin)
        times[name] = best
    dist.destroy_process_group()
    return {"latency_s": times["small"], "bytes_per_s": SIZE * 4 / times["large"]}


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), sys.argv[2], sys.argv[3])))
