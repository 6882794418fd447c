"""Runs collectives over groups of mesh axes on the devices of one host: whether they are right, and how long they take.

    python benchmarks/node_collectives.py groups [--ranks 8] [--device h100-sxm-80g]
    python benchmarks/node_collectives.py sweep  [--ranks 8] [--device h100-sxm-80g] [--most-mib 512]

groups: for meshes of so many devices, the group over each set of axes and over parts of an axis is made, and programs
with one collective of each kind run on it, as a training step runs them; results of whole numbers have to be those of
one device. sweep: times each kind over all devices, from 64 KiB on, beside the plan's price. Rank 0 prints a JSON line
for each. With `--device cpu` gloo takes the place of NCCL. Exits with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from tpshard.cli.shared.worker_errors import describe
from tpshard.devices.read import device as device_of
from tpshard.parallelism.mesh import Axes, Axis, Mesh, size_of
from tpshard.parallelism.partitioning.partition import partition
from tpshard.parallelism.pricing.cost import collective
from tpshard.parallelism.pricing.network import Topology
from tpshard.parallelism.program import group_name
from tpshard.parallelism.runtime import place as places
from tpshard.parallelism.runtime.context import Context, connect
from tpshard.parallelism.runtime.execute import Executor
from tpshard.parallelism.runtime.groups import Groups
from tpshard.parallelism.runtime.launcher import Nodes, launch
from tpshard.parallelism.runtime.worker import run_worker
from tpshard.parallelism.simulate import cut

MESHES: dict[int, list[dict[str, int]]] = {
    2: [{"tp": 2}],
    4: [{"fsdp": 2, "tp": 2}, {"pp": 4}],
    8: [{"dp": 2, "fsdp": 2, "tp": 2}, {"pp": 4, "fsdp": 2}, {"tp": 8}],
}
"""By the number of devices: meshes that have every group which a recipe of a node uses."""
KINDS: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], Any]] = {
    "all_gather": (lambda x: x * 2, ((0,),), None),
    "reduce_scatter": (lambda x, y: x @ y, ((1,), (0,)), 0),
    "all_reduce": (lambda x, y: x @ y, ((1,), (0,)), None),
    "all_to_all": (lambda x: x * 2, ((0,),), 1),
    "permute": (lambda x: x.roll(1, 0), ((0,),), 0),
}
"""A function whose program has that collective, and the dims of operands and result that the axes shard."""


def sets_of_axes(mesh: Mesh) -> list[Axes]:
    """Every set of whole axes, and the halves of axes of more than two devices."""
    whole = [Axis(name, 1, size) for name, size in mesh.axes.items()]
    sets: list[Axes] = [c for n in range(1, len(whole) + 1) for c in itertools.combinations(whole, n)]
    longer = [axis for axis in whole if axis.size > 2]
    return [*sets, *((half,) for a in longer for half in (Axis(a.name, 1, 2), Axis(a.name, 2, a.size // 2)))]


def check(context: Context) -> Iterator[dict[str, Any]]:
    """A row for each mesh, set of axes and kind."""
    for sizes in MESHES[context.world]:
        mesh = Mesh(sizes)
        own = replace(context, groups=Groups(mesh, backend=context.groups.backend, timeout=context.groups.timeout))
        for axes in sets_of_axes(mesh):
            context.barrier()
            began = time.perf_counter()
            own.groups.ensure([axes])
            made_s = time.perf_counter() - began
            for kind in KINDS:
                began = time.perf_counter()
                ok, kinds = run(own, axes, kind)
                row = {"mesh": sizes, "axes": group_name(axes), "kind": kind, "issued": kinds}
                yield row | {"ok": all(context.gather(ok)), "made_s": made_s, "seconds": time.perf_counter() - began}
        own.groups.close()


def run(context: Context, axes: Axes, kind: str) -> tuple[bool, list[str]]:
    """Whether this rank's part of the result of one program is right, and the kinds of its collectives."""
    fn, sharded, out = KINDS[kind]
    side = 2 * size_of(axes)
    operands = [torch.arange(side * side).view(side, side).float() % 7 + i for i in range(len(sharded))]

    def sharding(dim: int | None) -> tuple[Any, ...]:
        return () if dim is None else (*[None] * dim, tuple(map(tuple, axes)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = partition(fn, operands, context.mesh, [sharding(*dims) for dims in sharded], [sharding(out)])
    local = [x.to(context.device) for x in program.local(context.rank, *operands)]
    (actual,) = Executor(program, context)(*local)
    expected = cut(fn(*operands), program.outputs[0].layout, context.mesh, context.rank)
    return torch.equal(actual.cpu(), expected), [c.kind for c in program.collectives]


def sweep(context: Context, device: str, most: int) -> Iterator[dict[str, Any]]:
    """A row for each kind and number of bytes: its median seconds over all devices, and the plan's."""
    whole = (Axis("tp", 1, context.world),)
    context.groups.ensure([whole])
    group = distributed_c10d._resolve_process_group(group_name(whole))
    one, topology = device_of(device).shared_by(context.world), Topology(context.mesh, context.world)
    size = 1 << 16
    while size <= most:
        x = torch.ones(size // 4, device=context.device)
        part, out = x[: len(x) // context.world].clone(), torch.empty_like(x)
        issue: dict[str, Callable[[], object]] = {
            "all_reduce": lambda x=x: dist.all_reduce(x, dist.ReduceOp.MAX, group=group),
            "all_gather": lambda x=x, part=part: dist.all_gather_into_tensor(x, part, group=group),
            "reduce_scatter": lambda x=x, part=part: dist.reduce_scatter_tensor(part, x, group=group),
            "all_to_all": lambda x=x, out=out: dist.all_to_all_single(out, x, group=group),
        }
        for kind, collect in issue.items():
            seconds = [timed(context, collect) for _ in range(4)][1:]
            priced = collective(one, topology, kind, whole, size).seconds
            yield {"kind": kind, "bytes": size, "seconds": statistics.median(seconds), "planned_s": priced}
        size *= 4


def timed(context: Context, collect: Callable[[], object], repeat: int = 10) -> float:
    """Seconds of one of several in a row, of the slowest rank."""

    def finish() -> None:
        if context.device.type == "cuda":
            torch.cuda.synchronize()

    finish()
    context.barrier()
    began = time.perf_counter()
    for _ in range(repeat):
        collect()
    finish()
    return max(context.gather((time.perf_counter() - began) / repeat))


def work(options: argparse.Namespace, place: places.WorkerPlace) -> int:
    kind, ok = "cpu" if options.device == "cpu" else "cuda", True
    with connect(place, Mesh({"tp": place.world}), device=kind, start_s=120, step_s=60) as context:
        context.watchdog.limit_s = 60
        rows = check(context) if options.what == "groups" else sweep(context, options.device, options.most_mib << 20)
        for row in rows:
            ok &= row.get("ok", True)
            context.watchdog.progress += 1
            if context.is_main:
                print(json.dumps(row), flush=True)
    return int(not ok)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("groups", "sweep"))
    parser.add_argument("--ranks", type=int, default=8, choices=MESHES)
    parser.add_argument("--device", default="h100-sxm-80g")
    parser.add_argument("--most-mib", type=int, default=512)
    options = parser.parse_args()
    place = places.find(os.environ)
    if place is None:
        sys.exit(launch([sys.executable, __file__, *sys.argv[1:]], world=options.ranks, nodes=Nodes()))
    run_worker(lambda: work(options, place), place, describe)


if __name__ == "__main__":
    main()
