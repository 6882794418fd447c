"""The `Context` of a worker: rank, device, process groups, and agreement among ranks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tpshard.diagnostics.exits import Exit
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.pipeline.queue_order import CONNECTIONS, MAX_CONNECTIONS
from tpshard.parallelism.runtime.groups import Groups
from tpshard.parallelism.runtime.heap import keep_freed_memory
from tpshard.parallelism.runtime.messages import WorkerFault
from tpshard.parallelism.runtime.outstanding import Outstanding
from tpshard.parallelism.runtime.place import WorkerPlace
from tpshard.parallelism.runtime.rendezvous import meet
from tpshard.parallelism.runtime.stop import StopRequest, exit_code
from tpshard.parallelism.runtime.watchdog import Doing, Watchdog

DIFFERENT_PROGRAMS = "ranks that run different programs would wait for each other forever"
SAME_VERSIONS = "install the same versions everywhere, and start every worker with the same recipe and PYTHONHASHSEED"


def put(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, to which it is copied while the host goes on."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass
class Context:
    """The connection of one of `world` workers to the others.

    A program's collectives run on `groups`. The training loop's decisions (`any`, `stop`, `agree`) run on the CPU over
    the default group, whatever the device.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device
    backend: str
    """gloo on CPU; cpu:gloo,cuda:nccl on CUDA."""
    store: dist.Store
    groups: Groups
    watchdog: Watchdog
    stopping: StopRequest = field(default_factory=StopRequest)

    @property
    def mesh(self) -> Mesh:
        return self.groups.mesh

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files that are written once."""
        return self.rank == 0

    def largest(self, number: int) -> int:
        """The largest of the numbers that the ranks pass. Every rank must call it."""
        if self.world == 1:
            return number
        shared = torch.tensor(number)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)

    def put(self, tensor: Tensor) -> Tensor:
        """A tensor of the host on this worker's device, to which it is copied while the host goes on."""
        return put(tensor, self.device)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. Every rank must call it."""
        return self.largest(int(flag)) > 0

    def stop(self) -> int:
        """The exit code (75, or 130 for Ctrl-C) once any rank was asked to stop, else 0. Every rank must call it."""
        return exit_code(self.largest(self.stopping.urgency))

    def gather(self, value: Any) -> list[Any]:
        """The values (JSON: tuples come back as lists) of all ranks, in their order. Every rank must call it."""
        return _gather(value, self.world)

    def from_main(self, value: Any) -> Any:
        """Sends rank 0's value (JSON) to all ranks, and returns it. Every rank must call it."""
        return self.gather(value if self.is_main else None)[0]

    def barrier(self) -> None:
        """Returns when every rank has called it; on the CPU, so that it works when a device is out of memory."""
        self.largest(0)

    def gather_beside(self) -> Callable[[Any], list[Any]]:
        """`gather` with a group of its own, for a thread that runs beside the training steps. Every rank must call
        this; values may then be gathered in any order relative to other collectives.
        """
        group = dist.new_group(backend="gloo") if self.world > 1 else None
        return lambda value: _gather(value, self.world, group)

    def agree(self, values: Mapping[str, str], why: str = DIFFERENT_PROGRAMS, fix: str = SAME_VERSIONS) -> None:
        """Checks that all ranks run the same program, before the first step. Every rank must call it.

        values: the hash or version of each compared item (recipe, program, torch). Raises WorkerFault (exit 5), the
        same on every rank, with the first item that differs and the ranks that differ from the majority.
        """
        everyone = self.gather([dict(values), socket.gethostname()])
        if text := disagreement([one for one, _ in everyone], [host for _, host in everyone]):
            raise WorkerFault(text, exit=Exit.MACHINE, why=why, fix=fix)

    def close(self) -> None:
        """Ends this worker's part in the run: its watchdog, signal handlers and process groups. Every rank must call
        it, after the last collective.
        """
        self.watchdog.close()
        self.stopping.close()
        self.groups.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _gather(value: Any, world: int, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values (JSON) of all ranks of a group; None: of all."""
    own = json.dumps(value).encode()
    if world == 1:
        return [json.loads(own)]
    longest = torch.tensor(len(own))
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    padded = torch.frombuffer(bytearray(own.ljust(int(longest))), dtype=torch.uint8)
    texts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(texts, padded, group=group)
    return [json.loads(text.numpy().tobytes()) for text in texts]


def alone(device: torch.device | str = "cpu") -> Context:
    """The context of a single process, without other workers or a watchdog."""
    groups, watchdog = Groups(Mesh({})), Watchdog(0, float("inf"))
    return Context(0, 1, 0, torch.device(device), "", dist.HashStore(), groups, watchdog)


def disagreement(values: list[Mapping[str, str]], hosts: list[str]) -> str:
    """A sentence that names the first item in which ranks differ, and these ranks; "" if all agree."""
    for key in values[0]:
        of_ranks = [one.get(key, "missing") for one in values]
        usual = max(Counter(of_ranks).items(), key=lambda item: (item[1], item[0] == of_ranks[0]))[0]
        odd = [rank for rank, value in enumerate(of_ranks) if value != usual]
        if odd:
            names = ", ".join(f"rank {r} on {hosts[r]} has {of_ranks[r][:16]}" for r in odd[:4])
            more = f" (and {len(odd) - 4} more)" if len(odd) > 4 else ""
            return f"the ranks do not agree on the {key}: {names}{more}, the others {usual[:16]}"
    return ""


@contextlib.contextmanager
def connect(
    place: WorkerPlace,
    mesh: Mesh,
    *,
    device: str = "cpu",
    start_s: float = 600,
    step_s: float = 600,
    watch: bool = True,
) -> Iterator[Context]:
    """Joins the other workers and yields the Context; leaves them when the block ends without an error.

    device: cpu or cuda. step_s: how long a collective may take; the first ones may take `start_s`, which has to cover
    compilation. The watchdog reports before they time out. Raises WorkerFault: exit 5 where the mesh, the number of
    workers or the device do not fit, exit 9 where the others do not connect within `start_s`.
    """
    if mesh.ranks != place.world:
        raise WorkerFault(
            f"the mesh {mesh.axes} has {mesh.ranks} devices, but {place.world} workers were started",
            exit=Exit.MACHINE,
            fix=f"start {mesh.ranks} workers, or use a mesh of {place.world} devices",
        )
    if device == "cuda":
        _configure_cuda()
    if place.local_rank >= 0:
        _device(device, place)  # before the others are met, so that they need not wait for an error here
    stopping = StopRequest()
    if watch:
        stopping.listen()
    store, place = meet(place, start_s)
    chosen = _device(device, place)
    if chosen.type == "cpu":
        keep_freed_memory()
    else:
        _claim(store, place, chosen)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    _choose_interface(place)
    # the watchdog names the collective that hangs; the backend's own timeout, which does not, comes later
    limit = timedelta(seconds=max(start_s, step_s) + 60)
    try:
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.world, timeout=limit,
            device_id=chosen if chosen.type == "cuda" else None,
        )  # fmt: skip
    except (RuntimeError, dist.DistError) as error:
        raise WorkerFault(
            f"rank {place.rank} could not join the {place.world} workers within {start_s:g} s: {error}",
            exit=Exit.WORKER_LOST,
            fix="check whether all workers were started, and whether they can reach each other",
        ) from error
    watchdog = Watchdog(place.rank, start_s)
    if chosen.type == "cuda":
        watchdog.outstanding = Outstanding()
    groups = Groups(mesh, backend="nccl" if chosen.type == "cuda" else None, timeout=limit)
    context = Context(place.rank, place.world, place.local_rank, chosen, backend, store, groups, watchdog, stopping)
    if watch:
        watchdog.start()
    if chosen.type == "cuda":
        slower = "the slower kind would decide how long a step takes"
        context.agree({"kind of GPU": torch.cuda.get_device_name(chosen)}, slower, "choose hosts with GPUs of one kind")
    yield context
    # only without an error: after one, other ranks are gone or stuck, and a regular exit would wait for them
    watchdog.doing = Doing("leaving the run")
    context.close()


def _configure_cuda() -> None:
    """Settings that CUDA reads at its first use; those in the environment stay.

    Streams that share a connection wait for each other, so that a pipeline with few of them could hang (see
    `pipeline.queue_order`). Without expandable segments, freed memory of other sizes is reserved and not used.
    """
    os.environ.setdefault(MAX_CONNECTIONS, str(CONNECTIONS))
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def _device(kind: str, place: WorkerPlace) -> torch.device:
    """The device of a worker. Raises WorkerFault (exit 5) where the host has too few CUDA devices."""
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count <= place.gpu(count):
        raise WorkerFault(
            f"worker {place.local_rank} of this host needs a CUDA device of its own, but "
            f"{'no CUDA device is' if count == 0 else f'only {count} are'} visible",
            exit=Exit.MACHINE,
            fix="check `tpshard doctor`; or choose `cluster.device: cpu`",
        )
    device = torch.device("cuda", place.gpu(count))
    torch.cuda.set_device(device)
    return device


def _claim(store: dist.Store, place: WorkerPlace, device: torch.device) -> None:
    """Raises WorkerFault (exit 5) where another worker has this GPU, at which NCCL would stop without a name."""
    properties = torch.cuda.get_device_properties(device)
    if store.add(f"tpshard/gpu/{properties.uuid}", 1) > 1:
        raise WorkerFault(
            f"rank {place.rank} on {socket.gethostname()} and another worker have the same GPU ({properties.name})",
            exit=Exit.MACHINE,
            why=f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}",
            fix="let each worker see all GPUs of its host, or one of its own (srun --gpus-per-task=1)",
        )


def _choose_interface(place: WorkerPlace) -> None:
    """Binds gloo and NCCL to loopback if all ranks are local, else to the interface that reaches the rendezvous.

    By default both use the host's name, which may not resolve, and listen on the address it resolves to.
    """
    if place.all_local:
        name = loopback()
    elif place.rendezvous.startswith("tcp:"):
        host = place.rendezvous.removeprefix("tcp:").rpartition(":")[0].strip("[]")
        name = interface_towards(host)
    else:
        name = ""
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def loopback() -> str:
    """The name of the loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")


def interface_towards(host: str) -> str:
    """The name of the interface through which this host reaches `host`; empty if unknown."""
    import psutil

    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # Sends nothing: it only looks up the route.
            own_address = probe.getsockname()[0]
    except OSError:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own_address for entry in addresses):
            return name
    return ""
