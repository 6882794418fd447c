"""The figures of a priced step as plain data, which needs neither its programs nor torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tpshard.parallelism.pipeline.schedules import Slot, Table
from tpshard.parallelism.pricing.cost import Device
from tpshard.plan.step.units import round_figure, round_figures


# ---- a pipeline -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class StagePrice:
    """The price of one stage of a pipeline."""

    stage: int
    device: int
    """Its position on the pipeline's axis."""
    layers: int
    saved_bytes: int
    """Bytes per device that one micro-batch saves for the backward pass."""
    sent_bytes: int
    """Bytes per device that one micro-batch sends to other stages."""
    late_s: float
    """Seconds after the task's end until its output has arrived at the next stage."""
    seconds: Mapping[str, float]
    """Seconds of its programs on one micro-batch, by the name of the task."""


@dataclass(frozen=True)
class DevicePrice:
    """The price of one position on the pipeline's axis."""

    busy_s: float
    """Seconds of its tasks in the schedule, without waiting for others or for a core."""
    once_s: float
    """Seconds of the work done once per step: the update and its inputs."""
    peak_bytes: int
    held: int
    """The maximal number of (micro-batch, stage) pairs whose activations it holds."""
    collectives: int
    """Collectives per step, without sends and receives between stages."""
    sent_bytes: int
    """Bytes that it sends per step, to other stages too."""


@dataclass(frozen=True)
class PricedPipeline:
    """The schedule of a pipeline with its times."""

    table: Table
    slots: Sequence[Slot]
    """The time of every task, in seconds from the start of the step."""
    stages: Sequence[StagePrice]
    devices: Sequence[DevicePrice]
    balanced: bool
    """Whether layers are split among stages by their times; otherwise the recipe gives the split."""

    @property
    def kinds(self) -> list[str]:
        """The kinds of tasks that a stage runs on each micro-batch."""
        return list(self.stages[0].seconds)

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first task to the end of the last."""
        return max(slot.end for slot in self.slots)

    @property
    def bubble(self) -> float:
        """The share of the devices' time in the schedule that they wait for other stages."""
        return self.table.bubble(self.slots)

    @property
    def slowest(self) -> int:
        """The device with the most computation, for which the others wait."""
        return max(range(len(self.devices)), key=lambda i: self.devices[i].busy_s)

    @property
    def above_mean(self) -> float:
        """How much longer the slowest device computes than the mean, as a share of the mean."""
        mean = sum(device.busy_s for device in self.devices) / len(self.devices)
        return self.devices[self.slowest].busy_s / mean - 1.0 if mean else 0.0

    @property
    def idle_s(self) -> float:
        """Seconds that the slowest device waits for others or for a core, in the schedule and at the work done once."""
        slowest = self.devices[self.slowest]
        return (self.seconds - slowest.busy_s) + (max(device.once_s for device in self.devices) - slowest.once_s)

    def to_json(self) -> dict[str, Any]:
        """The pipeline as `plan --json` prints it."""
        table = self.table
        return {
            "schedule": table.schedule,
            "form": "staged",
            "devices": table.devices,
            "rounds": table.rounds,
            "micro_batches": table.micro_batches,
            "bubble": round_figure(self.bubble),
            "seconds": round_figure(self.seconds),
            "slowest": self.slowest,
            "split": [stage.layers for stage in self.stages],
            "balanced": self.balanced,
            "above_mean": round_figure(self.above_mean),
            "stages": [round_figures(asdict(stage)) for stage in self.stages],
            "by_device": [round_figures(asdict(device)) for device in self.devices],
            "table": [" ".join(f"{t.kind}{t.micro}/{t.stage}" for t in row) for row in table.rows],
        }  # fmt: skip


# ---- a step ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Bucket:
    """A collective of FSDP in the part of a step that takes most of its time."""

    kind: str
    phase: str
    values: tuple[str, ...]
    """The parameters that it gathers, or whose gradients it sums."""
    bytes: int
    time_s: float
    behind_s: float
    """Seconds of computation between its issue and the wait for it, which may hide it."""
    exposed_s: float
    """Seconds that the computation waits for it."""


@dataclass(frozen=True)
class Line:
    """The collectives of one kind over the same axes for the same purpose, in a whole step."""

    kind: str
    axes: tuple[Any, ...]
    of: str
    wire: str
    """`inside` a host or `across` hosts."""
    level: str
    """The network level that takes longest; `inside` or `across` where the device file names no levels."""
    dtype: str
    algorithm: str
    phase: str
    requested: bool
    reason: str
    count: int
    members: int
    bytes: int
    wire_bytes: int
    time_s: float
    exposed_s: float


class PlannedOp(NamedTuple):
    """An operation of a program by name."""

    module: str
    phase: str
    origin: str
    flops: int
    kind: str = ""
    """The kind of a collective; "" for what computes. So are the next four."""
    value: str = ""
    bytes: int = 0
    reason: str = ""
    wire: str = ""


class PlannedEvent(NamedTuple):
    """An interval on a lane, in seconds; `op` is the index of its operation."""

    name: str
    lane: str
    start: float
    end: float
    op: int


@dataclass(frozen=True)
class PartFigures:
    """The figures of a program of a step."""

    name: str
    times: int
    """Runs in a step."""
    each_s: float
    """Seconds of a run."""
    size: int
    """The number of its operations."""
    peak_bytes: int
    at_peak: Mapping[str, int]
    largest: Sequence[tuple[str, str, int]]
    """The name, category and bytes of the largest values at the peak."""
    always: Mapping[str, int]
    """Bytes by category that stay in memory besides its own."""

    @property
    def seconds(self) -> float:
        """Seconds of all runs of the part in a step."""
        return self.each_s * self.times


@dataclass(frozen=True)
class DrawnPart(PartFigures):
    """A program of a step with the timeline of one run, and its memory over time."""

    ops: Sequence[PlannedOp]
    events: Sequence[PlannedEvent]
    at: Sequence[float]
    """The time at which each operation was done."""
    curve: Sequence[int]
    """Bytes held while each operation runs; by category in `curves`."""
    curves: Mapping[str, Sequence[int]]

    @property
    def drawn_s(self) -> float:
        """Seconds until all that it began has ended: what it sends to another stage may end after its computation."""
        return max([self.each_s, *(event.end for event in self.events)]) or 1.0

    @property
    def lanes(self) -> list[str]:
        """The names of its lanes: computation, waiting, and then those of its collectives."""
        names = {event.lane for event in self.events}
        return [lane for lane in ("compute", "wait") if lane in names] + sorted(names - {"compute", "wait"})


@dataclass(frozen=True)
class Offloaded:
    """What a step of one device keeps in its host's memory until the backward pass."""

    held_bytes: int
    """The most that it holds there at once, in pinned tensors of torch."""
    moved_bytes: int
    """Bytes that are copied there in a step, and as many back."""
    copying_s: float
    """Seconds of the copies, both ways."""
    exposed_s: float
    """Seconds that the device waits for them."""


class StepMemory(ABC):
    """What a device's memory says of a step that holds `peak_bytes`."""

    device: Device
    limit: int | None
    """The most bytes that the recipe lets a step hold at its peak (`fsdp.memory_limit`)."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Peak memory of a step on one device, in bytes."""

    @property
    @abstractmethod
    def reserved_bytes(self) -> int:
        """Bytes that the allocator has reserved on the device at the peak."""

    @property
    def needed_bytes(self) -> int:
        """Reserved bytes plus those taken before the first tensor."""
        return self.reserved_bytes + self.device.context_bytes

    @property
    def fits(self) -> bool:
        """Whether a step fits the device's memory and keeps the recipe's limit."""
        return self.needed_bytes <= self.device.memory_bytes and not self.over_limit_bytes

    @property
    def counted_bytes(self) -> int:
        """The bytes that are compared with the recipe's limit, or with the device's memory where it has none."""
        return self.needed_bytes if self.limit is None else self.peak_bytes

    @property
    def over_limit_bytes(self) -> int:
        """Bytes by which the peak exceeds the recipe's limit; 0 where it keeps it or has none."""
        return 0 if self.limit is None else max(0, self.peak_bytes - self.limit)


@dataclass(frozen=True)
class StepFigures(StepMemory):
    """The price of a step: seconds, bytes and FLOPs of one device. Of a pipeline, parts are the slowest device's."""

    device: Device
    parts: Sequence[PartFigures]
    worst: PartFigures
    """The part in which memory peaks."""
    peak_at: str
    """Where in the step memory peaks: part, module and operation."""
    step_s: float
    compute_s: float
    comm_s: float
    exposed_s: float
    slowed_s: float
    idle_s: float
    fixed_s: float
    """Seconds of a step outside of operations."""
    work_s: Mapping[str, float]
    """Seconds of the computing lane by kind of work."""
    static_bytes: Mapping[str, int]
    """Bytes per device of stored parameters, gradients and optimizer state: exact."""
    local_flops: int
    """FLOPs of one device without recomputation."""
    useful_flops: int
    """FLOPs of all devices without recomputation."""
    allocator_bytes: int
    """`reserved_bytes`."""
    segmented_bytes: int | None
    """What it would be without expandable segments; None on a CPU."""
    pipeline: PricedPipeline | None = None
    limit: int | None = None
    offloaded: Offloaded | None = None
    recomputed_s: float = 0.0
    """Seconds of computing that repeats what the forward pass computed."""

    @property
    def peak_bytes(self) -> int:
        return self.worst.peak_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.allocator_bytes
