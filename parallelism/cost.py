"""What one operation or collective costs on a named device: plain numbers in, seconds out.

Everything that prices anything reads this: the planner, automatic bucketing, the search. A `Device` is data (read from
a file by whoever may read files); nothing here looks at the machine it runs on.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from typing import Literal

from tpshard.parallelism.exchange import carried
from tpshard.parallelism.mesh import Axes
from tpshard.parallelism.network import Level, Link, Topology, Wire, hierarchical_s, pairwise_s
from tpshard.parallelism.rules.entry import Work


@dataclass(frozen=True)
class Crowd:
    """What one of so many processes at once on a host reaches, each computing, moving or sending the same.

    They share cores, caches and memory, and above the number of cores they take turns: shares of an even part of the
    host's rates, a multiple of what an operation costs besides its work, and what a process sends to the others.
    """

    compute: float = 1.0
    memory: float = 1.0
    growth: float | None = None
    """Of `Cpu.growth`; None: as of the memory's bandwidth."""
    overhead: float = 1.0
    bandwidth: float = 0.0
    """Bytes/s that one process sends; 0: an even part of the host's."""
    latency_s: float = 0.0
    """Of one hop; 0: `inside`'s, times the turns that processes take."""
    skew_s: float = 0.0
    """Of a collective, however little it sends: until the system has given each member its turn."""
    spread: float = 0.0
    """Of a collective, as a share of what was computed since the last: until the last of its members has come."""
    slowdown: float | None = None
    """Share of its computing rate that a process loses beside a collective; None: `inside`'s."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of a device's rates that operations reach."""

    matmul: float = 0.75
    """Of the dense rate: large matrix products."""
    attention: float = 0.5
    """Of the dense rate: fused attention, forward."""
    attention_backward: float = 0.4
    streaming: float = 0.85
    """Of the memory bandwidth: pointwise operations and reductions."""


@dataclass(frozen=True)
class Overhead:
    """Times that do not depend on how much is computed."""

    op_s: float = 4e-6
    """Least time of one operation run from a compiled graph."""
    eager_op_s: float = 8e-6
    """Least time of one operation issued by the interpreter."""
    issue_s: float = 2e-5
    """Time that issuing a collective and waiting for it takes from the computing lane."""
    step_s: float = 0.0
    """What a training step costs besides its operations: data, metrics, the host's loop."""

    def times(self, factor: float) -> Overhead:
        return Overhead(*(factor * seconds for seconds in astuple(self)))


@dataclass(frozen=True)
class Cpu:
    """What only a CPU has: processes that share its cores, and costs that a GPU hides behind its kernels."""

    cores: int = 0
    """Of the host, shared by its processes; the device's rates are the whole host's."""
    packing: float = 1.0
    """Share of the memory bandwidth at which a matrix product reads its operands and writes its result."""
    exponential: float = 0.0
    """What an element's exponential costs (of `exp`, `silu`, ...), in bytes of pointwise operations."""
    softmax: float = 0.0
    """What the softmax of a score costs, in dims of a head: attention's FLOPs count 1 + softmax / head_dim times."""
    view_s: float = 0.0
    """Time the interpreter takes for an operation that moves nothing: a view."""
    growth: float = 0.0
    """Bytes/s at which the memory that a program takes and gives back is made ready; 0: at no cost."""
    skew_s: float = 0.0
    """What a collective waits, however little it sends, until each member has its turn; of a process that has been
    given its share, from `crowds`."""
    spread: float = 0.0
    """What ranks drift apart while they compute, and a collective waits for, as a share of what was computed since the
    last; of a process that has been given its share, from `crowds`."""
    crowds: Mapping[int, Crowd] = field(default_factory=dict)
    """By number of processes on a host; between two of them the smaller one's is taken."""


@dataclass(frozen=True)
class Device:
    """One accelerator (or one CPU process) and the host and network it sits in. Rates in FLOP/s, sizes in bytes."""

    name: str
    kind: Literal["gpu", "cpu"]
    backend: Literal["nccl", "gloo"]
    memory_bytes: int
    context_bytes: int
    """Taken before the first tensor: driver context, communication library, compiled kernels."""
    memory_bandwidth: float
    rates: Mapping[str, float]
    """Dense FLOP/s by dtype name (`bf16`, `fp16`, `fp32`, `fp8`)."""
    host_devices: int
    inside: Link
    across: Link
    efficiency: Efficiency = Efficiency()
    overhead: Overhead = Overhead()
    reserved: float = 1.05
    """Bytes the allocator reserves for each byte allocated at the peak."""
    cpu: Cpu = Cpu()
    levels: tuple[Level, ...] = ()
    """Of the network, from the nearest; empty where `inside` and `across` are all of it."""
    fitted: Mapping[str, str] = field(default_factory=dict)
    """Constant -> how it was fitted. A figure that rests on one of them is `calibrated`, else `roofline`."""

    @cached_property
    def network(self) -> tuple[Level, ...]:
        """The levels that groups of devices send through, from the nearest."""
        return self.levels or (Level("inside", self.inside, devices=sys.maxsize), Level("across", self.across))

    @property
    def slowdown(self) -> dict[str, float]:
        """By level the share of the computing rate lost while a collective runs over it."""
        return {level.name: level.link.slowdown for level in self.network}

    @property
    def stream_rate(self) -> float:
        """Bytes/s of pointwise operations and reductions."""
        return self.memory_bandwidth * self.efficiency.streaming

    def shared_by(self, processes: int) -> Device:
        """The device that one of `processes` on a host has. Only a CPU's cores and memory are shared.

        What they lose to each other besides is in `cpu.crowds`; where that says nothing, overheads grow with the turns
        that more processes than cores take.
        """
        own = self.cpu
        if self.kind != "cpu" or (processes <= 1 and 1 not in own.crowds):
            return self
        turns = max(1.0, processes / max(1, own.cores))
        measured = max((n for n in own.crowds if n <= processes), default=0)
        crowd = own.crowds.get(measured, Crowd())
        # beyond the largest crowd that was measured, and without any, overheads grow as the turns do
        more = turns / max(1.0, measured / max(1, own.cores))
        inside = replace(
            self.inside,
            latency_s=(crowd.latency_s or self.inside.latency_s) * more,
            slowdown=self.inside.slowdown if crowd.slowdown is None else crowd.slowdown,
        )
        if crowd.bandwidth:
            inside = replace(inside, bandwidth=crowd.bandwidth * measured / processes, shared=False)
        overhead = crowd.overhead * more
        return replace(
            self,
            inside=inside,
            rates={dtype: rate * crowd.compute / processes for dtype, rate in self.rates.items()},
            memory_bandwidth=self.memory_bandwidth * crowd.memory / processes,
            memory_bytes=self.memory_bytes // processes,
            overhead=self.overhead.times(overhead),
            cpu=replace(
                own,
                growth=own.growth * (crowd.memory if crowd.growth is None else crowd.growth) / processes,
                view_s=own.view_s * overhead,
                skew_s=crowd.skew_s * more,
                spread=crowd.spread,
                crowds={},
            ),
        )

    def rate(self, dtype: str) -> float:
        """FLOP/s of a matrix product in `dtype`; the next wider dtype's where the device has none of its own."""
        for known in (_SHORT.get(dtype, dtype), "bf16" if dtype in _HALF else "fp32", "fp32"):
            if known in self.rates:
                return self.rates[known]
        return max(self.rates.values())

    def unfitted(self, constants: Iterable[str]) -> tuple[str, ...]:
        """Those of these constants (as the device file's `fitted` names them) that nothing was fitted to."""
        return tuple(name for name in constants if name not in self.fitted)


_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8"}
_HALF = ("bf16", "fp16", "bfloat16", "float16", "int8", "int4", "fp8", "float8_e4m3fn")


@dataclass(frozen=True)
class CommCost:
    seconds: float
    wire_bytes: int
    """Bytes that one device sends."""
    wire: Wire
    algorithm: str
    level: str = "none"
    """Of the network, that takes longest: what collectives of other groups share with it."""


def wire_bytes(kind: str, buffer: int, members: int, backend: str = "nccl") -> int:
    """Bytes one device sends for a collective whose buffer (see `program.Collective.bytes`) has `buffer` bytes.

    gloo's own reduce-scatter is an all-reduce of which each rank keeps its part, hence twice the ring's bytes.
    """
    if members <= 1:
        return 0
    if kind in ("permute", "send"):
        return buffer
    if kind == "recv":  # counted where it is sent
        return 0
    rounds = 2 if kind == "all_reduce" or (kind == "reduce_scatter" and backend == "gloo") else 1
    return rounds * buffer * (members - 1) // members


def collective(device: Device, topology: Topology, kind: str, refs: Axes, buffer: int) -> CommCost:
    """Skew, latency, and bytes over bandwidth, as the executor sends it: on a CPU some are exchanges.

    A device with levels takes the fastest of a ring, a tree, and level by level; one without takes the ring, or the
    tree where that has less latency.
    """
    span = topology.span(refs)
    if span.members <= 1:
        return CommCost(0.0, 0, "none", "none")
    if kind == "recv":  # takes as long as its send, which runs elsewhere
        return CommCost(0.0, 0, span.wire, "point to point", span.wire)
    as_kind, received = carried(kind, buffer, span.members) if device.kind == "cpu" else (kind, buffer)
    sent = wire_bytes(as_kind, received, span.members, device.backend)
    # gloo's all-reduce takes both rounds also between two, where they send no more than the buffer
    rounds = 2 if sent > received or (as_kind == "all_reduce" and device.backend == "gloo") else 1
    found = topology.crossings(refs, device.network, device.host_devices)
    tree = rounds * sum(math.ceil(math.log2(one.parts)) * one.level.link.latency_s for one in found)
    if as_kind in ("all_to_all", "permute", "send"):
        times = pairwise_s(as_kind, received, span.members, found)
        seconds, name = max(times.values()) + tree, "pairwise" if as_kind == "all_to_all" else "point to point"
    else:
        ring = rounds * sum(one.hops * one.level.link.latency_s for one in found)
        times = {one.level.name: sent / one.ring_rate() for one in found}
        ways = {"ring": max(times.values()) + ring, "tree": max(times.values()) + 2 * tree}
        steps = hierarchical_s(received, span.members, rounds, found) if device.levels and len(found) > 1 else {}
        if steps:
            ways["hierarchical"] = sum(steps.values())
        name = min(ways, key=ways.__getitem__)
        seconds, times = ways[name], steps if name == "hierarchical" else times
    if kind == "reduce_scatter" and as_kind == kind and device.backend == "gloo":
        name = "all-reduce, own part kept"
    elif as_kind != kind:
        name = "all-to-all and local sum"
    if device.kind == "cpu" and kind in ("all_reduce", "reduce_scatter"):
        seconds += received / device.stream_rate
    level = max(times, key=times.__getitem__) if device.levels else span.wire
    return CommCost(seconds + device.cpu.skew_s, sent, span.wire, name, level)


def operation(
    device: Device, work: Work, flops: int, moved: int, dtype: str, *, eager: bool, head_dim: int = 0,
    exponentials: int = 0,
) -> float:  # fmt: skip
    """Seconds of one kernel: the larger of computing and moving bytes (the roofline), at the device's efficiencies.

    `moved` counts bytes read and written in the device's memory; `head_dim` is attention's; `exponentials` counts the
    elements of a stream that take one. A CPU computes and moves in turn: there the two add up.
    """
    if work == "free":
        return 0.0
    least = device.overhead.eager_op_s if eager else device.overhead.op_s
    memory = (moved + device.cpu.exponential * exponentials) / device.stream_rate
    if work == "stream":
        return memory + least if device.kind == "cpu" else max(memory, least)
    share = getattr(device.efficiency, work)
    compute = flops / (device.rate(dtype) * share)
    if work != "matmul" and head_dim:
        compute *= 1 + device.cpu.softmax / head_dim
    if device.kind == "cpu":
        packed = moved / (device.memory_bandwidth * device.cpu.packing) if work == "matmul" else 0.0
        return compute + packed + least
    return max(compute, memory, least)
