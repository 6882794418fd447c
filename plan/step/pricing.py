"""Prices a step: simulates its programs on compute and communication lanes, and follows memory over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tpshard.parallelism.pricing.cost import BUS_LANES, CommCost, Device
from tpshard.parallelism.pricing.flow import info_of
from tpshard.parallelism.pricing.fusion import NONE, CacheReads, Compiled, Kernel
from tpshard.parallelism.pricing.liveness import Memory, liveness
from tpshard.parallelism.pricing.timeline import Priced, Timeline, price
from tpshard.parallelism.program import Collective, Info, Program
from tpshard.parallelism.runtime.heap import MAPPED_BYTES
from tpshard.plan.step.figures import Line, Offloaded, PricedPipeline, StepMemory
from tpshard.plan.step.reserve import Replay, Turn


@dataclass(frozen=True)
class StepPart:
    """A program that a step runs `times` times, with `always` bytes (by category) in memory besides its own."""

    name: str
    program: Program
    times: int = 1
    always: Mapping[str, int] = field(default_factory=dict)
    compiled: Compiled = "all"
    cached: CacheReads = NONE


@dataclass
class PricedPart:
    """A part of a step with its cost: the timeline of one run, and its memory."""

    part: StepPart
    priced: Priced
    timeline: Timeline
    memory: Memory

    def collectives(self) -> Iterator[tuple[Info, Collective, CommCost, float]]:
        """Yields its collectives in issue order, then those of bodies of control flow, as often as they run: the node's
        `Info`, the collective, its cost and exposed seconds."""
        for i, cost in self.priced.costs.items():
            info = info_of(self.priced.kernels[i].node)
            assert info.comm is not None
            yield info, info.comm, cost, self.timeline.exposed.get(i, 0.0)
        for body, timeline, times in self.priced.bodies:
            inner = [*replace(self, priced=replace(body, bodies=[]), timeline=timeline).collectives()]
            yield from inner * times

    @property
    def seconds(self) -> float:
        """Seconds of all runs of the part in a step."""
        return self.timeline.seconds * self.part.times

    def mapped_s(self, device: Device) -> float:
        """Seconds that a CPU's operating system takes to provide memory, over all runs of the part in a step.

        The heap of a process keeps what earlier steps freed, but results of `MAPPED_BYTES` and more are mapped anew.
        """
        mapped = sum(span.bytes for span in self.memory.spans if span.bytes >= MAPPED_BYTES)
        return mapped * self.part.times / device.cpu.growth if device.cpu.growth else 0.0


@dataclass
class Pricing(StepMemory):
    """The price of a step: seconds, bytes and FLOPs of one device; with stages, of the slowest."""

    device: Device
    parts: list[PricedPart]
    fixed_s: float
    """Seconds of a step outside of operations: the training loop, and getting memory from the system."""
    worst: PricedPart
    """The part in which memory peaks, over all devices."""
    useful_flops: int
    """The FLOPs of all devices, without recomputation."""
    idle_s: float = 0.0
    """Seconds that the device waits for other stages."""
    pipeline: PricedPipeline | None = None
    """The schedule of a step with stages."""
    limit: int | None = None
    replay: Replay | None = None
    """What the device allocates in a step; None on a CPU, whose heap is no allocator of segments."""

    def _sum(self, name: str) -> float:
        return float(sum(getattr(p.timeline, name) * p.part.times for p in self.parts))

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self._sum("seconds") + self.idle_s + self.fixed_s

    @property
    def compute_s(self) -> float:
        """Seconds of a step in which the device computes."""
        return self._sum("compute_s") + self.fixed_s

    @property
    def comm_s(self) -> float:
        """Seconds of a step in which a collective is in flight."""
        return self._sum("comm_s")

    @property
    def exposed_s(self) -> float:
        """Seconds of a step in which the device only waits for communication."""
        return self._sum("exposed_s")

    @property
    def slowed_s(self) -> float:
        """Seconds by which communication slows down computation that runs at the same time."""
        return self._sum("slowed_s")

    @property
    def peak_bytes(self) -> int:
        """Peak memory of a step on one device, in bytes."""
        return self.worst.memory.peak_bytes

    @property
    def recomputed_s(self) -> float:
        """Seconds of computing that repeats what the forward pass computed."""
        return sum(
            part.part.times * task.seconds
            for part in self.parts
            for task, kernel in zip(part.priced.tasks, part.priced.kernels)
            if task.kind == "compute" and info_of(kernel.node).phase == "recompute"
        )

    @property
    def offloaded(self) -> Offloaded | None:
        """What waits in the host's memory; None where nothing does."""
        if not (held := max(part.memory.host_bytes for part in self.parts)):
            return None
        moved, copying_s, exposed_s = 0, 0.0, 0.0
        for part in self.parts:
            for i, task in enumerate(part.priced.tasks):
                if task.lane in BUS_LANES:
                    moved += part.part.times * part.priced.kernels[i].written * (task.lane == BUS_LANES[0])
                    copying_s += part.part.times * task.seconds
                    exposed_s += part.part.times * part.timeline.exposed.get(i, 0.0)
        return Offloaded(held, moved, copying_s, exposed_s)

    @cached_property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator has reserved on the device at the peak."""
        replayed = 0 if self.replay is None else self.replay.reserved_bytes(self.device)
        return max(self.peak_bytes, replayed)

    @property
    def segmented_bytes(self) -> int | None:
        """`reserved_bytes` without expandable segments; None on a CPU."""
        return None if self.replay is None else self.replay.reserved_bytes(self.device, expandable=False)

    @property
    def local_flops(self) -> int:
        """The FLOPs of the device, without recomputation."""
        return flops_of(self.parts)[0]

    def issues(self) -> list[tuple[Line, list[Collective]]]:
        """The step's collectives in lines, the most expensive first, each collective once however often its part
        runs."""
        groups: dict[tuple[Any, ...], list[tuple[Info, Collective, CommCost, float, int]]] = {}
        for entry in self.parts:
            for info, comm, cost, exposed in entry.collectives():
                key: tuple[Any, ...] = (
                    comm.kind, comm.axes, comm.of, cost.wire, cost.level, comm.dtype, cost.algorithm, info.phase,
                    comm.requested,
                )  # fmt: skip
                groups.setdefault(key, []).append((info, comm, cost, exposed, entry.part.times))
        lines = []
        for key, rows in groups.items():
            sums: list[Any] = [0, 0, 0, 0, 0.0, 0.0]
            for _, comm, cost, exposed, times in rows:
                added = 1, comm.members, comm.bytes, cost.wire_bytes, cost.seconds, exposed
                sums = [total + value * times for total, value in zip(sums, added)]
            issued = [comm for _, comm, *_ in rows]
            lines.append((Line(*(*key, issued[0].reason, *sums)), issued))
        return sorted(lines, key=lambda row: (-row[0].time_s, row[0].kind, str(row[0].axes), row[0].of, row[0].phase))

    def lines(self) -> list[Line]:
        """The step's collectives in lines, the most expensive first."""
        return [line for line, _ in self.issues()]


def work_of(kernel: Kernel) -> tuple[int, int]:
    """The FLOPs of a kernel: those of one device, and those of the whole operation."""
    info = info_of(kernel.node)
    times = kernel.flops / info.flops if info.flops and kernel.flops else 1.0
    return (kernel.flops or info.flops), int(info.global_flops * times)


def memory_of(part: StepPart, priced: Priced, device: Device) -> Memory:
    """The memory of a priced part."""
    return liveness(part.program, priced.kernels, always=part.always, device=device)


def price_part(part: StepPart, device: Device, per_host: int) -> PricedPart:
    """The time and memory of one part of a step; `device` is that of one process."""
    priced = price(part.program, device, per_host, compiled=part.compiled, cached=part.cached)
    return PricedPart(part, priced, priced.run(), memory_of(part, priced, device))


def peak_of(parts: Iterable[PricedPart]) -> PricedPart:
    """The part in which memory peaks."""
    return max(parts, key=lambda part: part.memory.peak_bytes)


def flops_of(parts: Iterable[PricedPart]) -> tuple[int, int]:
    """The FLOPs of parts of a step without recomputation: those of one device, and those of the whole operations."""
    local = whole = 0
    for entry in parts:
        for kernel in entry.priced.kernels:
            if info_of(kernel.node).phase != "recompute":
                own, all_devices = work_of(kernel)
                local += own * entry.part.times
                whole += all_devices * entry.part.times
    return local, whole


def price_parts(parts: Sequence[StepPart], device: Device, per_host: int) -> Pricing:
    """Prices programs that run one after another: the memory and time of each on a device.

    per_host: devices of a host that the mesh uses.
    """
    device = device.shared_by(per_host)
    priced = [price_part(part, device, per_host) for part in parts]
    mapped_s = sum(part.mapped_s(device) for part in priced)
    worst = peak_of(priced)
    static = [*worst.part.always.values(), *(port.local_bytes for port in worst.part.program.inputs)]
    turns = [Turn(part.memory, i) for i, part in enumerate(priced)]
    replay = Replay(static, turns) if device.kind == "gpu" else None
    return Pricing(device, priced, mapped_s, worst, flops_of(priced)[1], replay=replay)
