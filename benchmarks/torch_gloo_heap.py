"""Shows that torch's gloo corrupts the heap of a process with two all-gathers in flight, in seconds, without tpshard.

    python benchmarks/torch_gloo_heap.py [--gathers 400000] [--starts 5]

After each collective, a thread of `ProcessGroupGloo` stores the collective's name, without a lock, in a string that all
threads of the group share (`runLoop`: `pgStatus_->lastCompletedWorkName = opTypeToString(...)`; 2.11 to 2.13). A group
has two threads. Names of at most 15 characters are stored inside the string. ALLGATHER_COALESCED, the name of
`_c10d_functional.all_gather_into_tensor`, is allocated on the heap, and two threads can free it twice.
`all_gather_into_tensor_out` is called ALLGATHER. One process is enough: alone in its group it waits for no one, so that
its threads finish a collective every few microseconds.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys

IN_FLIGHT = 64


def run(op: str, gathers: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    funcol, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    sent = torch.ones(8)
    for _ in range(gathers // IN_FLIGHT):
        if op == "all_gather_into_tensor":
            flying = [funcol.all_gather_into_tensor(sent, 1, name) for _ in range(IN_FLIGHT)]
        else:
            flying = [funcol.all_gather_into_tensor_out(sent, 1, name, out=torch.empty(8)) for _ in range(IN_FLIGHT)]
        for tensor in flying:
            funcol.wait_tensor(tensor)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gathers", type=int, default=400_000)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--op", help="run this one here")
    chosen = parser.parse_args()
    if chosen.op:
        return run(chosen.op, chosen.gathers)
    for op in ("all_gather_into_tensor", "all_gather_into_tensor_out"):
        command = [sys.executable, __file__, "--op", op, "--gathers", str(chosen.gathers)]
        codes = [subprocess.run(command, capture_output=True).returncode for _ in range(chosen.starts)]
        died = [signal.Signals(-code).name for code in codes if code < 0]
        print(f"{op}: {len(died)} of {len(codes)} starts died{': ' if died else ''}{' '.join(died)}", flush=True)


if __name__ == "__main__":
    main()
