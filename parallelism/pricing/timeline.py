"""Simulating one device's step on lanes in issue order: one for computation, one per group for communication, and two
for copies to the host's memory and back, which are as collectives are.

The compute lane runs nodes in program order. A collective is handed to its group's lane when the compute lane reaches
it, runs after earlier ones of that lane, shares its link with those of other groups, and slows computation while it
runs. Its wait blocks the compute lane until it is done; that time is *exposed*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, NamedTuple

from torch import fx
from tpshard.parallelism.node_info import operand_shapes, programs_in
from tpshard.parallelism.pricing.cost import BUS_LANES, CommCost, Device, collective
from tpshard.parallelism.pricing.flow import Flow, info_of
from tpshard.parallelism.pricing.fusion import NONE, CacheReads, Compiled, Kernel, kernels, seconds
from tpshard.parallelism.pricing.network import Topology
from tpshard.parallelism.program import Collective, Program
from tpshard.parallelism.rules.control_flow import CONTROL_FLOW, cond, priced, rounds, scan
from tpshard.parallelism.transfer import COPIES, copied, offload
from tpshard.parallelism.words import axes_text


class LaneTask(NamedTuple):
    """One task of the compute lane: compute for `seconds`, issue a collective, or wait for one."""

    name: str
    kind: Literal["compute", "issue", "wait"]
    seconds: float
    lane: str = "compute"
    wire: str = "none"
    """The network level that it shares with other collectives."""
    of: int = -1
    """For a wait, the index of the task that issued the collective."""
    within: tuple[float, float] = (0.0, 0.0)
    """Of control flow, the seconds in which collectives of its bodies run, and in which computing waits for them."""


class TimelineEvent(NamedTuple):
    """An interval on a lane; `task` is the index of its task."""

    name: str
    lane: str
    start: float
    end: float
    task: int


@dataclass
class Timeline:
    """The simulated intervals, in seconds from the start of the program."""

    seconds: float
    compute_s: float
    """The compute lane's work, without slowdown."""
    comm_s: float
    """Time during which at least one collective ran."""
    exposed_s: float
    """Time during which the compute lane waited for a collective, or for a copy from the host's memory or to it."""
    slowed_s: float
    """Time added to computation by collectives that ran at the same time."""
    events: list[TimelineEvent] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    """The time at which each task was done on the compute lane."""
    exposed: dict[int, float] = field(default_factory=dict)
    """Seconds that the compute lane waited for each collective, by the index of its issuing task."""


def simulate(tasks: Sequence[LaneTask], slowdown: dict[str, float]) -> Timeline:
    """The timeline of a device that issues these tasks in order: when each starts and ends, on compute and network.

    slowdown: for each network level, the share of the computing rate that a collective on it takes.
    """
    return _Lanes(tasks, slowdown).run()


class _Lanes:
    """The state of a simulation: the time, and the collectives that wait and run on each lane."""

    def __init__(self, tasks: Sequence[LaneTask], slowdown: dict[str, float]):
        self.tasks = tasks
        self.slowdown = slowdown
        self.now = 0.0
        self.lanes: dict[str, deque[int]] = {}
        self.left = {i: t.seconds for i, t in enumerate(tasks) if t.kind == "issue"}
        self.began: dict[int, float] = {}
        self.done: set[int] = set()
        self.running: list[int] = []
        self.comm_s = self.slowed_s = 0.0
        self.events: list[TimelineEvent] = []

    def run(self) -> Timeline:
        compute_s = exposed_s = 0.0
        at: list[float] = []
        exposed: dict[int, float] = {}
        for i, task in enumerate(self.tasks):
            if task.kind == "compute":
                if task.seconds > 0:
                    comm_s, waited_s = task.within
                    compute_s += task.seconds - waited_s
                    exposed_s += waited_s
                    self.comm_s += comm_s
                    start = self.now
                    self._compute(task.seconds)
                    self.events.append(TimelineEvent(task.name, "compute", start, self.now, i))
            elif task.kind == "issue":
                lane = self.lanes.setdefault(task.lane, deque())
                lane.append(i)
                if len(lane) == 1:
                    self._begin(i)
            else:
                start = self.now
                while task.of not in self.done:
                    self._advance(self._next())
                if self.now > start:
                    waited = self.now - start
                    exposed_s += waited
                    exposed[task.of] = exposed.get(task.of, 0.0) + waited
                    self.events.append(TimelineEvent(f"wait {self.tasks[task.of].name}", "wait", start, self.now, i))
            at.append(self.now)
        while self.running:
            step = self._next()
            exposed_s += step
            last = self.running[0]
            exposed[last] = exposed.get(last, 0.0) + step
            self._advance(step)
        self.events.sort(key=lambda e: (e.start, e.task))
        return Timeline(self.now, compute_s, self.comm_s, exposed_s, self.slowed_s, self.events, at, exposed)

    def _begin(self, i: int) -> None:
        self.began[i] = self.now
        self.running.append(i)

    def _sharing(self, i: int) -> int:
        wire = self.tasks[i].wire
        return sum(1 for j in self.running if self.tasks[j].wire == wire)

    def _next(self) -> float:
        """Seconds until the first running collective is done."""
        return min(self.left[i] * self._sharing(i) for i in self.running)

    def _advance(self, dt: float) -> None:
        self.now += dt
        self.comm_s += dt if any(self.tasks[i].lane not in BUS_LANES for i in self.running) else 0.0
        for i in self.running:
            self.left[i] -= dt / self._sharing(i)
        finished = [i for i in self.running if self.left[i] <= 1e-12]
        for i in finished:
            self.running.remove(i)
            self.done.add(i)
            lane = self.lanes[self.tasks[i].lane]
            lane.popleft()
            self.events.append(TimelineEvent(self.tasks[i].name, self.tasks[i].lane, self.began[i], self.now, i))
        for i in finished:
            lane = self.lanes[self.tasks[i].lane]
            if lane and lane[0] not in self.began:
                self._begin(lane[0])

    def _compute(self, work: float) -> None:
        while work > 0:
            if not self.running:
                self.now += work
                return
            lost = max(self.slowdown.get(self.tasks[i].wire, 0.0) for i in self.running)
            rate = 1.0 - min(lost, 0.95)
            step = min(self._next(), work / rate)
            done = step * rate
            self.slowed_s += step - done
            work = work - done if work - done > 1e-12 else 0.0
            self._advance(step)


@dataclass
class Priced:
    """A program with the cost of each node."""

    program: Program
    kernels: list[Kernel]
    tasks: list[LaneTask]
    costs: dict[int, CommCost]
    """The cost of each collective, by the index of its issuing node."""
    slowdown: dict[str, float]
    bodies: list[tuple[Priced, Timeline, int]] = field(default_factory=list)
    """The bodies of its control flow that are counted, each with its timeline and how often it runs."""

    def run(self) -> Timeline:
        """The simulated timeline of the tasks."""
        return simulate(self.tasks, self.slowdown)

    def behind(self) -> dict[int, float]:
        """Seconds of computation between each collective's issue and the first wait for it, by its issuing task."""
        before = [0.0, *accumulate(task.seconds if task.kind == "compute" else 0.0 for task in self.tasks)]
        waits: dict[int, int] = {}
        for i, task in enumerate(self.tasks):
            if task.kind == "wait":
                waits.setdefault(task.of, i)
        return {i: before[waits.get(i, len(self.tasks))] - before[i] for i in self.costs}


def price(
    program: Program, device: Device, devices_per_host: int, *, compiled: Compiled, cached: CacheReads = NONE,
    topology: Topology | None = None,
) -> Priced:  # fmt: skip
    """Prices one run of a program: a task for every node, in issue order.

    device: the share of a device that one process has (`Device.shared_by`). cached: the reads of a server's cache.
    topology: a placement of the mesh's axes other than in their order.
    """
    topology = topology or Topology(program.mesh, devices_per_host)
    parts, flow = kernels(program, compiled=compiled, cached=cached), Flow.of(program)
    index = {kernel.node: i for i, kernel in enumerate(parts)}
    tasks: list[LaneTask] = []
    costs: dict[int, CommCost] = {}
    run: list[tuple[Priced, Timeline, int]] = []
    apart = 0.0  # seconds by which ranks have drifted apart since their last collective
    for i, kernel in enumerate(parts):
        node, comm = kernel.node, flow.info[kernel.node].comm
        if comm is not None and node.op == "call_function":
            cost = costs[i] = comm_cost(device, topology, comm, apart)
            apart = 0.0 if cost.wire != "none" else apart
            lane = axes_text(comm.axes)  # every process group has its own queue
            tasks.append(LaneTask(node.name, "issue", cost.seconds, lane, cost.level))
        elif node.target in CONTROL_FLOW:
            inside = [
                price(body, device, devices_per_host, compiled="none", topology=topology) for body in programs_in(node)
            ]
            tasks.append(_of_bodies(node, inside, run, device))
        elif node.target in COPIES:
            tasks.append(_host_copy(node, device))
        elif node.target is copied and device.kind == "cpu":
            tasks.append(LaneTask(node.name, "compute", 0.0))
        elif flow.name[node] == "wait_tensor" or node.target is copied:
            tasks.append(LaneTask(node.name, "wait", 0.0, of=_issuer(node, index)))
        else:
            tasks.append(LaneTask(node.name, "compute", seconds(kernel, device)))
            apart += device.cpu.spread * tasks[-1].seconds
    return Priced(program, parts, tasks, costs, device.slowdown, run)


def _host_copy(node: fx.Node, device: Device) -> LaneTask:
    """The task of a copy between the memories of a device and its host, which a CPU makes itself."""
    if device.kind == "cpu":
        return LaneTask(node.name, "compute", 2 * info_of(node).bytes / device.stream_rate + device.overhead.eager_op_s)
    lane = BUS_LANES[node.target is not offload]  # a bus carries both ways at once
    bus = device.bus
    took = info_of(node).bytes / (bus.bandwidth * bus.efficiency) + bus.latency_s
    return LaneTask(node.name, "issue", took, lane, lane)


def _of_bodies(
    node: fx.Node, inside: list[Priced], run: list[tuple[Priced, Timeline, int]], device: Device
) -> LaneTask:
    """The task of control flow, which takes what its bodies do: of a condition the one that is priced. Adds these to
    `run`. A condition on a GPU makes the host wait for it, for about as long as a collective."""
    times = rounds(node.target, node.args, operand_shapes(node))
    timed = [(body, body.run(), times) for body in inside]
    if node.target is cond:
        timed = [priced(node.args, timed, lambda each: max(each, key=lambda one: one[1].seconds))]
    for body, timeline, _ in timed:
        run += [(body, timeline, times), *((inner, own, times * n) for inner, own, n in body.bodies)]
    total_s, comm_s, exposed_s = (
        times * sum(getattr(timeline, name) for _, timeline, _ in timed) for name in ("seconds", "comm_s", "exposed_s")
    )
    if node.target is not scan and device.kind == "gpu":
        total_s += times * device.overhead.issue_s
    return LaneTask(node.name, "compute", total_s, within=(comm_s, exposed_s))


def comm_cost(device: Device, topology: Topology, comm: Collective, apart: float = 0.0) -> CommCost:
    """The cost of a collective, including its issue and a wait of `apart` seconds for the last member to arrive."""
    cost = collective(device, topology, comm.kind, comm.refs, comm.bytes)
    return replace(cost, seconds=cost.seconds + device.overhead.issue_s + (apart if cost.wire != "none" else 0.0))


def _issuer(wait: fx.Node, index: dict[fx.Node, int]) -> int:
    """The index of the node that issued the collective of a wait."""
    node = wait.all_input_nodes[0]
    while info_of(node).comm is None and node.target not in COPIES and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return index[node]
