"""Ranks on a CPU issue only the all-gather that gloo may run in several threads."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tpshard.parallelism import Mesh, Program, partition
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Executor, localize
from tpshard.parallelism.runtime.gloo import all_gather

funcol = torch.ops._c10d_functional

SHORT = {"all_gather_into_tensor_out", "all_reduce", "all_to_all_single", "wait_tensor"}
"""What gloo calls by names of at most 15 characters; see `all_gather`."""


def gathering(ranks: int = 2) -> Program:
    """Two weights that are stored sharded and used whole, and a sum over the shards of a third."""
    inputs = [torch.empty(n, n, device="meta") for n in (4, 4, 4)]
    return partition(
        lambda a, b, c: (a @ b, (c * c).sum()), inputs, Mesh({"x": ranks}), [("x",), ("x",), ("x",)], [(), ()]
    )  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
def test_programs_gather_by_that_op_on_a_cpu_alone(compiled: bool) -> None:
    program = gathering()
    wait = None if compiled else lambda tensor, _: funcol.wait_tensor.default(tensor)
    for device, expected in (("cpu", all_gather), ("cuda", funcol.all_gather_into_tensor.default)):
        graph = localize(program, 0, torch.device(device), wait, exchange=device == "cpu").graph
        gathers = [node.target for node in graph.nodes if "all_gather" in str(node.target)]
        assert gathers and all(target is expected for target in gathers)


class Names(TorchDispatchMode):
    """Collectives by name, as they are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def dispatch(context: Context) -> tuple[set[str], list[Tensor]]:
    program = gathering(context.world)
    inputs = [torch.arange(16.0).reshape(4, 4) + i for i in range(3)]
    executor, names = Executor(program, context), Names()
    with names:
        executed = executor(*program.local(context.rank, *inputs))
    return names.names, executed


def test_ranks_dispatch_short_names_alone_and_gather_what_the_simulation_gathers(pool: Any) -> None:
    inputs = [torch.arange(16.0).reshape(4, 4) + i for i in range(3)]
    expected = gathering(2).simulate(*inputs)
    for ops, actual in pool.run(dispatch, world=2):
        assert {"all_gather_into_tensor_out", "wait_tensor"} <= ops <= SHORT
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


GATHERS = """
import os, torch, torch.distributed as dist
from tpshard.parallelism.runtime.gloo import all_gather
torch.set_num_threads(1)

def threaded(store, rank, size, timeout):
    options = dist.ProcessGroupGloo._Options()
    options._threads, options._timeout = 8, timeout
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    return dist.ProcessGroupGloo(store, rank, size, options)

dist.Backend.register_backend("threaded", threaded, devices=["cpu"])
dist.init_process_group("threaded", store=dist.HashStore(), rank=0, world_size=1)
name, sent = dist.group.WORLD.group_name, torch.ones(8)
for _ in range(600):
    for started in [all_gather(sent, 1, name) for _ in range(64)]:
        torch.ops._c10d_functional.wait_tensor(started)
os._exit(0)  # a group that ends with its process may find its threads still there, and abort
"""


def test_gathers_that_end_at_the_same_time_leave_the_heap_whole() -> None:
    """Alone in its group a process ends a gather every few microseconds, here on eight threads instead of two; gathers
    without `out` killed it each time that this was tried."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", GATHERS], env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
