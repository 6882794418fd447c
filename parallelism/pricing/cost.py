"""The cost model computes the seconds of an operation or a collective on a device, from plain numbers.

The planner, automatic bucketing and the search use it. A `Device` is plain data; the host is never inspected.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from tpshard.parallelism.mesh import Axes
from tpshard.parallelism.pricing.network import Level, Link, Topology, Wire, hierarchical_s, pairwise_s
from tpshard.parallelism.resharding.exchange import cpu_collective

if TYPE_CHECKING:
    from tpshard.parallelism.rules.entry import Work


@dataclass(frozen=True)
class Crowd:
    """The slowdown of each of several processes that run on one host and share its cores, caches and memory.

    `compute` and `memory` are rates relative to the host's divided by the number of processes; `overhead` is a multiple
    of the overhead of a process alone.
    """

    compute: float = 1.0
    memory: float = 1.0
    growth: float | None = None
    """Share of `Cpu.growth`; None: the share of the memory bandwidth."""
    overhead: float = 1.0
    bandwidth: float = 0.0
    """Bytes/s that one process sends; 0: an even part of the host's."""
    latency_s: float = 0.0
    """Seconds per hop; 0: `inside`'s, times the turns that processes take."""
    skew_s: float = 0.0
    """Fixed seconds of a collective, until every member has had its turn."""
    spread: float = 0.0
    """Delay of the last member of a collective, as a share of the compute time since the previous one."""
    slowdown: float | None = None
    """Share of its compute rate that a process loses during a collective; None: `inside`'s."""
    message_s: float = 0.0
    """Seconds of a core that sending and receiving one message between two processes takes each of them."""


@dataclass(frozen=True)
class Efficiency:
    """The shares of a device's FLOP/s and memory bandwidth that kinds of operations reach."""

    matmul: float = 0.75
    """Share of the dense rate that large matrix products reach."""
    attention: float = 0.5
    """Share of the dense rate that fused attention reaches, forward."""
    attention_backward: float = 0.4
    streaming: float = 0.85
    """Share of the memory bandwidth that pointwise operations and reductions reach."""
    reading: float = 0.0
    """Share of the memory bandwidth at which a server's products of few rows read their weights; 0: as `streaming`."""


@dataclass(frozen=True)
class ServingOverhead:
    """Seconds that a server's host takes besides its programs. Zero where nobody measured them."""

    step_s: float = 0.0
    """Per step: scheduling, messages to the workers and back, sampling."""
    token_s: float = 0.0
    """Per token of an answer: its text, and sending it over HTTP."""
    request_s: float = 0.0
    """From a request's arrival to the first step that may take it: HTTP, checks, tokenization."""


@dataclass(frozen=True)
class Overhead:
    """Times that do not depend on the amount of computation."""

    op_s: float = 4e-6
    """Minimal seconds of one operation of a compiled graph."""
    eager_op_s: float = 8e-6
    """Minimal seconds of one operation issued by the interpreter."""
    issue_s: float = 2e-5
    """Seconds of the compute lane for issuing a collective and waiting for it."""
    step_s: float = 0.0
    """Seconds of a training step besides its operations: data, metrics, the host's loop."""
    serving: ServingOverhead = ServingOverhead()

    def times(self, factor: float) -> Overhead:
        """These overheads multiplied by `factor`, except those of a server's host, which is one process."""
        return Overhead(
            factor * self.op_s, factor * self.eager_op_s, factor * self.issue_s, factor * self.step_s, self.serving
        )


EVICTING_BYTES = 12 << 20
"""`Cpu.cold_overhead` is measured with this many bytes moved between two operations of one kind. They evict the
operation's code from the near caches. Twice as many evict it from all caches, so that overheads grow no further."""


@dataclass(frozen=True)
class Cpu:
    """Constants that only a CPU has: processes share its cores, and overheads are not hidden behind kernels."""

    cores: int = 0
    """Cores of the host, shared by its processes; the device's rates are the whole host's."""
    packing: float = 1.0
    """Share of the memory bandwidth at which a matrix product reads its operands and writes its result."""
    exponential: float = 0.0
    """Cost of an element's exponential (of `exp`, `silu`, ...), in bytes of pointwise operations."""
    softmax: float = 0.0
    """Cost of the softmax of attention scores: attention's FLOPs are multiplied by 1 + softmax / head_dim."""
    view_s: float = 0.0
    """Seconds of the interpreter for an operation that moves nothing, such as a view."""
    growth: float = 0.0
    """Bytes/s at which the system provides the memory that a program allocates and frees; 0: at no cost."""
    cold_bandwidth: float = 0.0
    """Bytes/s at which a program reads its inputs, which are in memory and not in a cache; 0: as anything else."""
    cold_overhead: float = 1.0
    """The overhead of an operation `EVICTING_BYTES` after the last one of its kind, as a multiple."""
    skew_s: float = 0.0
    """Fixed seconds of a collective, until every member has had its turn; set from `crowds` for a process's share."""
    spread: float = 0.0
    """Delay of the last member of a collective, as a share of the compute time since the previous one; set from
    `crowds` for a process's share."""
    message_s: float = 0.0
    """Seconds of a core that sending and receiving one message takes each of two processes; set from `crowds` for a
    process's share."""
    products: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Seconds per weight of a server's products, by the weight's layout and the number of rows. Layouts: `fp32`, `bf16`
    as the CPU's library packs them, `int4`, and `parts`, dense ones of quantized weights (see `kernels.int4`)."""
    crowds: Mapping[int, Crowd] = field(default_factory=dict)
    """The contention by number of processes on a host; between two entries the smaller one counts."""

    def product_s(self, layout: str, rows: int) -> float | None:
        """Seconds per weight of a product of so many rows, linear between those of the nearest; None if unknown."""
        known = sorted(self.products.get(layout, {}).items())
        if not known:
            return None
        (few, least), (many, most) = known[0], known[-1]
        if rows >= many:
            return most * rows / many
        if rows <= few:
            return least
        (r0, s0), (r1, s1) = next(pair for pair in pairwise(known) if pair[1][0] >= rows)
        return s0 + (s1 - s0) * (rows - r0) / (r1 - r0)

    def overhead_after(self, since: int) -> float:
        """The factor by which an operation's overhead grows, `since` bytes after the last operation of its kind."""
        return 1.0 + (self.cold_overhead - 1.0) * min(2.0, since / EVICTING_BYTES)


BUS = Link(bandwidth=31.5e9, latency_s=1e-5, efficiency=0.8)
"""PCI Express 4 with 16 lanes, which devices of unknown links to their host are taken to have."""
BUS_LANES = ("to host", "from host")
"""The lanes of a timeline with copies to the host's memory and back."""


@dataclass(frozen=True)
class Device:
    """One accelerator (or one CPU process) with its host and network. Rates in FLOP/s, sizes in bytes."""

    name: str
    kind: Literal["gpu", "cpu"]
    backend: Literal["nccl", "gloo"]
    memory_bytes: int
    context_bytes: int
    """Bytes taken before the first tensor: driver context, communication library, compiled kernels."""
    memory_bandwidth: float
    rates: Mapping[str, float]
    """Dense FLOP/s by dtype name (`bf16`, `fp16`, `fp32`, `fp8`)."""
    host_devices: int
    inside: Link
    across: Link
    efficiency: Efficiency = Efficiency()
    overhead: Overhead = Overhead()
    channels: int = 0
    """Channels of a ring of the communication library; those of a pair are the next power of two. 0: unknown, and
    further communicators count no memory (see `communicators`)."""
    bus: Link = BUS
    """The link of one device and its host's memory, each way."""
    cpu: Cpu = Cpu()
    levels: tuple[Level, ...] = ()
    """The network's levels, from the nearest; empty where `inside` and `across` are all levels."""
    fitted: Mapping[str, str] = field(default_factory=dict)
    """How each fitted constant was fitted. Figures that depend on one are `calibrated`, others `roofline`."""

    @cached_property
    def network(self) -> tuple[Level, ...]:
        """The levels that groups of devices send through, from the nearest."""
        return self.levels or (Level("inside", self.inside, devices=sys.maxsize), Level("across", self.across))

    @property
    def slowdown(self) -> dict[str, float]:
        """For each network level, the share of the computing rate lost while a collective runs over it."""
        return {level.name: level.link.slowdown for level in self.network}

    @property
    def exchanges(self) -> bool:
        """Whether some collectives run as an all-to-all with a local sum (see `parallelism.resharding.exchange`)."""
        return self.backend == "gloo"

    @property
    def stream_rate(self) -> float:
        """Bytes/s of pointwise operations and reductions."""
        return self.memory_bandwidth * self.efficiency.streaming

    @property
    def serving(self) -> Device:
        """The device as a server finds it, whose programs read weights above all (`Efficiency.reading`)."""
        of = self.efficiency
        return replace(self, efficiency=replace(of, streaming=of.reading)) if of.reading else self

    def shared_by(self, processes: int) -> Device:
        """Returns the share of a device that one of `processes` on a host has: a CPU is shared, a GPU is not.

        `cpu.crowds` describes their further contention; without it, overheads grow with the turns that more processes
        than cores take.
        """
        own = self.cpu
        if self.kind != "cpu" or (processes <= 1 and 1 not in own.crowds):
            return self
        turns = max(1.0, processes / max(1, own.cores))
        measured = max((n for n in own.crowds if n <= processes), default=0)
        crowd = own.crowds.get(measured, Crowd())
        # beyond the largest measured number of processes, overheads grow with the turns that they take on the cores
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
                cold_bandwidth=own.cold_bandwidth * crowd.memory / processes,
                view_s=own.view_s * overhead,
                skew_s=crowd.skew_s * more,
                spread=crowd.spread,
                message_s=crowd.message_s,
                products={
                    layout: {rows: s * processes / crowd.compute for rows, s in by_rows.items()}
                    for layout, by_rows in own.products.items()
                },
                crowds={},
            ),
        )

    def with_own_core(self, processes: int) -> Device:
        """Returns the share of one of `processes` on a host while at most as many of them compute as it has cores."""
        one_process, cores = self.shared_by(processes), max(1, self.cpu.cores)
        if self.kind != "cpu" or processes <= cores:
            return one_process
        few = self.shared_by(cores)
        return replace(
            one_process, rates=few.rates, memory_bandwidth=few.memory_bandwidth, overhead=few.overhead,
            cpu=replace(
                one_process.cpu, growth=few.cpu.growth, cold_bandwidth=few.cpu.cold_bandwidth, view_s=few.cpu.view_s
            ),
        )  # fmt: skip

    def rate(self, dtype: str) -> float:
        """FLOP/s of a matrix product in `dtype`; if the device has no rate for it, the next wider dtype's."""
        if self.kind == "cpu" and dtype in ("fp8", "float8_e4m3fn"):  # multiplied as fp32
            dtype = "fp32"
        for candidate in (_SHORT.get(dtype, dtype), "bf16" if dtype in _HALF else "fp32", "fp32"):
            if candidate in self.rates:
                return self.rates[candidate]
        return max(self.rates.values())

    def unfitted_constants(self, constants: Iterable[str]) -> tuple[str, ...]:
        """Those of `constants` that were not fitted on the device; names as in the device file's `fitted`."""
        return tuple(name for name in constants if name not in self.fitted)


_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8"}
_HALF = ("bf16", "fp16", "bfloat16", "float16", "int8", "int4", "fp8", "float8_e4m3fn")


@dataclass(frozen=True)
class CommCost:
    """The cost of one collective on one device."""

    seconds: float
    wire_bytes: int
    """Bytes that one device sends."""
    wire: Wire
    algorithm: str
    level: str = "none"
    """The network level that takes longest; collectives of other groups share it."""


def wire_bytes(kind: str, buffer: int, members: int, backend: str = "nccl") -> int:
    """Bytes one device sends for a collective with a buffer (see `program.Collective.bytes`) of `buffer` bytes.

    gloo's reduce-scatter is an all-reduce of which each rank keeps its part, so it sends twice a ring's bytes.
    """
    if members <= 1:
        return 0
    if kind in ("permute", "send"):
        return buffer
    if kind == "recv":  # counted at the sender
        return 0
    rounds = 2 if kind == "all_reduce" or (kind == "reduce_scatter" and backend == "gloo") else 1
    return rounds * buffer * (members - 1) // members


def collective(device: Device, topology: Topology, kind: str, refs: Axes, buffer: int) -> CommCost:
    """The cost of a collective over the axes `refs` with a buffer of `buffer` bytes, as the executor runs it.

    On a CPU some collectives run as exchanges (see `exchange`). A device with network levels uses the fastest of a
    ring, a tree and one step per level; one without uses a ring, or a tree where that has less latency.
    """
    span = topology.span(refs)
    if span.members <= 1:
        return CommCost(0.0, 0, "none", "none")
    if kind == "recv":  # takes as long as its send, which another device's program has
        return CommCost(0.0, 0, span.wire, "point-to-point", span.wire)
    as_kind, received = cpu_collective(kind, buffer, span.members) if device.kind == "cpu" else (kind, buffer)
    sent = wire_bytes(as_kind, received, span.members, device.backend)
    # gloo's all-reduce has two rounds even between two ranks, where they send no more than the buffer
    rounds = 2 if sent > received or (as_kind == "all_reduce" and device.backend == "gloo") else 1
    crossings = topology.crossings(refs, device.network, device.host_devices)
    tree = rounds * sum(math.ceil(math.log2(one.parts)) * one.level.link.latency_s for one in crossings)
    if as_kind in ("all_to_all", "permute", "send"):
        times = pairwise_s(as_kind, received, span.members, crossings)
        seconds, name = max(times.values()) + tree, "pairwise" if as_kind == "all_to_all" else "point-to-point"
    else:
        ring = rounds * sum(one.hops * one.level.link.latency_s for one in crossings)
        times = {one.level.name: sent / one.ring_rate() for one in crossings}
        ways = {"ring": max(times.values()) + ring, "tree": max(times.values()) + 2 * tree}
        steps: dict[str, float] = {}
        if device.levels and len(crossings) > 1:
            steps = hierarchical_s(received, span.members, rounds, crossings)
            ways["hierarchical"] = sum(steps.values())
        name = min(ways, key=ways.__getitem__)
        seconds, times = ways[name], steps if name == "hierarchical" else times
    if kind == "reduce_scatter" and as_kind == kind and device.backend == "gloo":
        name = "all-reduce, own part kept"
    elif as_kind != kind:
        name = "all-to-all+sum"
    if device.kind == "cpu" and kind in ("all_reduce", "reduce_scatter"):
        seconds += received / device.stream_rate
    level = max(times, key=times.__getitem__) if device.levels else span.wire
    return CommCost(seconds + device.cpu.skew_s, sent, span.wire, name, level)


def operation(
    device: Device, work: Work, flops: int, moved: int, dtype: str, *, eager: bool, head_dim: int = 0,
    exponentials: int = 0, cold: int = 0, since: int = 0, added: int = 0,
) -> float:  # fmt: skip
    """Seconds of one kernel by the roofline: the larger of computing and moving bytes, at the device's efficiencies.

    moved: bytes read and written in the device's memory. head_dim: attention's. exponentials: the number that a stream
    computes. cold, since, added: see `fusion.Kernel`. A CPU computes and moves in turn, so that the two add up.
    """
    if work == "free":
        return 0.0
    least = device.overhead.eager_op_s if eager else device.overhead.op_s
    if device.kind == "cpu":
        least *= device.cpu.overhead_after(since)
        if device.cpu.cold_bandwidth and not work.startswith("attention"):
            least += cold / device.cpu.cold_bandwidth
            moved -= added if work == "matmul" else cold  # a product packs its operands wherever they come from
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
