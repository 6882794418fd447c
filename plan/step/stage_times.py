"""Prices a pipeline: the time and memory of each task of the schedule, and the waiting of the devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tpshard.parallelism.pipeline import core_turns
from tpshard.parallelism.pipeline.core_turns import host_shares
from tpshard.parallelism.pipeline.schedules import Slot, StageTask, Table
from tpshard.parallelism.pipeline.stepping import RECEIVES_AHEAD, program_of
from tpshard.parallelism.pricing.cost import Device
from tpshard.parallelism.pricing.flow import info_of
from tpshard.parallelism.pricing.fusion import Compiled
from tpshard.parallelism.pricing.timeline import Priced, Timeline, price
from tpshard.parallelism.program import Program
from tpshard.plan.step.pricing import PricedPart, StepPart, bytes_of, memory_of, price_part
from tpshard.plan.step.units import round_figure, round_figures
from tpshard.programs.parts.step_programs import stored_ports
from tpshard.programs.step.staged import StagedPrograms

NAMES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
BETWEEN_STAGES = ("send", "recv")
"""Transfers of a pipeline, which a run does not count as collectives."""
HELD = {"parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer", "saved": "activations"}


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


@dataclass
class Piped:
    """The price of a step of a pipeline."""

    table: Table
    slots: list[Slot]
    """The time of every task, in seconds from the start of the step."""
    stages: list[StagePrice]
    devices: list[DevicePrice]
    parts: list[PricedPart]
    """The parts of the slowest device."""
    worst: PricedPart
    """The part in which memory peaks, over all devices."""
    useful_flops: int
    """FLOPs of all stages and micro-batches, without recomputation."""
    programs: StagedPrograms
    """The programs that are priced."""

    @property
    def kinds(self) -> list[str]:
        """The kinds of tasks that a stage runs on each micro-batch."""
        return list(self.stages[0].seconds)

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first task to the end of the last."""
        return max(slot.end for slot in self.slots)

    @property
    def step_s(self) -> float:
        """Seconds of a step: those of the schedule, plus the work done once, which all devices do together."""
        return self.seconds + max(device.once_s for device in self.devices)

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
        """Seconds that the slowest device waits for others, or for a core."""
        slowest = self.devices[self.slowest]
        return self.step_s - slowest.busy_s - slowest.once_s

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
            "balanced": self.programs.balanced,
            "above_mean": round_figure(self.above_mean),
            "stages": [round_figures(asdict(stage)) for stage in self.stages],
            "by_device": [round_figures(asdict(device)) for device in self.devices],
            "table": [" ".join(f"{t.kind}{t.micro}/{t.stage}" for t in row) for row in table.rows],
        }  # fmt: skip


def price_pipeline(pipeline: StagedPrograms, whole: Device, per_host: int, compiled: Compiled) -> Piped:
    """Prices every program once, then simulates the schedule with these times.

    whole: the device before processes share it. On a CPU with more processes than cores, a task's seconds are those on
    a core of its own, and the schedule has the turns that stages take.
    """
    table, device = pipeline.table, whole.with_own_core(per_host)
    runs: dict[tuple[str, int], tuple[Priced, Timeline]] = {}
    priced_programs: dict[int, tuple[Priced, Timeline]] = {}
    for stage in pipeline.stages:
        for kind in dict.fromkeys(task.kind for task in table.rows[table.device_of(stage.index)]):
            program = program_of(pipeline.stages, StageTask(kind, stage.index, 0))
            if id(program) not in priced_programs:  # stages that are alike may share their programs
                priced = price(program, device, per_host, compiled=compiled)
                priced_programs[id(program)] = (priced, _with_messages(priced, device))
            runs[kind, stage.index] = priced_programs[id(program)]

    def seconds(task: StageTask) -> float:
        return _until_handed_over(runs[task.kind, task.stage][1])

    def send_delay(task: StageTask) -> float:
        return _send_delay(*runs[task.kind, task.stage])

    cores = device.cpu.cores
    if device.kind == "cpu" and 0 < cores < per_host:
        shares = host_shares(pipeline.stages[0].forward.mesh, pipeline.axis, per_host)
        slots = core_turns.timetable(table, seconds, send_delay, shares, cores)
    else:
        slots = table.timetable(seconds, send_delay)
    stages, devices, worst, parts_of = [], [], [], []
    for stage in pipeline.stages:
        of_stage = {kind: run for (kind, index), run in runs.items() if index == stage.index}
        sent = (info_of(n).comm for program in stage.programs for n in program.graph.nodes)
        stages.append(
            StagePrice(
                stage.index, table.device_of(stage.index), pipeline.layers[stage.index],
                bytes_of(stage.forward.outputs, "saved"),
                sum(c.bytes for c in sent if c is not None and c.kind == "send"), _send_delay(*of_stage["F"]),
                {NAMES[kind]: _until_handed_over(timeline) for kind, (_, timeline) in of_stage.items()},
            )
        )  # fmt: skip
    for i in range(table.devices):
        parts, peak = _device(pipeline, i, runs, whole.shared_by(per_host), per_host, compiled)
        apart = sum(p.seconds for p in parts if p.part.name in ONCE)
        busy = sum(seconds(task) for task in table.rows[i])
        devices.append(DevicePrice(busy, apart, peak.memory.peak_bytes, table.most_held(i), *_sent(parts)))
        worst.append(peak)
        parts_of.append(parts)
    flops = sum(program.useful_flops for stage in pipeline.stages for program in stage.programs)
    once = sum(program.useful_flops for place in range(table.devices) for _, program in _run_once(pipeline, place))
    result = Piped(
        table, slots, stages, devices, [], max(worst, key=lambda p: p.memory.peak_bytes),
        table.micro_batches * flops + once, pipeline,
    )  # fmt: skip
    result.parts = parts_of[result.slowest]
    return result


def _sent(parts: list[PricedPart]) -> tuple[int, int]:
    """(collectives without those between stages, bytes sent) of the programs that a device runs in a step."""
    count = sent = 0
    for entry in parts:
        for _, comm, cost, _ in entry.collectives():
            count += entry.part.times * (comm.kind not in BETWEEN_STAGES)
            sent += entry.part.times * cost.wire_bytes
    return count, sent


ONCE = ("gather", "reduce", "exchange", "totals", "update")


def _device(
    pipeline: StagedPrograms, place: int, runs: Mapping[tuple[str, int], tuple[Priced, Timeline]], device: Device,
    per_host: int, compiled: Compiled,
) -> tuple[list[PricedPart], PricedPart]:  # fmt: skip
    """The programs that one device runs in a step, and the one in which its memory peaks."""
    table, programs = pipeline.table, pipeline.devices[place]
    rest = {HELD[kind]: bytes_of(programs.update.inputs, kind) for kind in ("gradient", "optimizer")}
    stored = stored_ports(pipeline.setting, pipeline.storage, programs.names)
    rest["parameters"] = bytes_of(stored, "parameter")
    if programs.gather is not None:
        rest["parameters"] += bytes_of(programs.gather.outputs, "parameter")
    parts, tallest = [], None
    held = dict.fromkeys(((s, m) for s in table.stages_of(place) for m in range(table.micro_batches)), 0)
    held_bytes = 0  # the sum of `held`
    own: dict[tuple[str, int], int] = {}
    first: dict[tuple[str, int], PricedPart] = {}
    row = table.rows[place]
    for i, task in enumerate(row):
        key, program = (task.kind, task.stage), program_of(pipeline.stages, task)
        coming = (program_of(pipeline.stages, later) for later in row[i + 1 : i + 1 + RECEIVES_AHEAD])
        messages = sum(bytes_of(later.inputs, "received") for later in coming)
        others = held_bytes - held[task.stage, task.micro] + messages
        inside = bytes_of(program.inputs, "saved")
        if key not in first:
            priced, timeline = runs[key]
            name = f"{NAMES[task.kind]} of stage {task.stage}"
            part = StepPart(name, program, table.micro_batches, _bytes_beside(rest, program, others), compiled)
            memory = memory_of(part, priced, device)
            own[key] = memory.peak_bytes - others
            first[key] = PricedPart(part, priced, _without_last_sends(timeline), memory)
            parts.append(first[key])
        more = max(0, held[task.stage, task.micro] - inside)  # what W will read, which stays while I runs
        peak = own[key] + others + more
        if tallest is None or peak > tallest[0]:
            tallest = (peak, key, others + more)
        saved = bytes_of(program.outputs, "saved")
        after = {"F": saved, "B": 0, "W": 0, "I": saved}[task.kind]
        if task.kind == "I":
            later = program_of(pipeline.stages, task._replace(kind="W"))
            after = bytes_of(later.inputs, "saved")
        held_bytes += after - held[task.stage, task.micro]
        held[task.stage, task.micro] = after
    assert tallest is not None
    _, key, others = tallest
    chosen = first[key]
    part = replace(chosen.part, always=_bytes_beside(rest, chosen.part.program, others))
    peak_part = replace(chosen, part=part, memory=memory_of(part, chosen.priced, device))
    for name, once in _run_once(pipeline, place):
        whole = price_part(StepPart(name, once, 1, _bytes_beside(rest, once, 0), compiled), device, per_host)
        parts.append(replace(whole, timeline=_without_last_sends(whole.timeline)))
    return parts, max([peak_part, *parts], key=lambda p: p.memory.peak_bytes)


def _run_once(pipeline: StagedPrograms, place: int) -> Iterator[tuple[str, Program]]:
    """Yields the programs that a device runs once per step, with their names."""
    programs = pipeline.devices[place]
    for name in ONCE:
        program: Program | None = getattr(programs, name)
        if program is not None:
            yield name, program


def _bytes_beside(rest: Mapping[str, int], program: Program, activations: int) -> dict[str, int]:
    """Bytes by category that stay in memory while a program runs, besides its own inputs."""
    sizes = {name: size - sum(bytes_of(program.inputs, kind) for kind, is_ in HELD.items() if is_ == name)
             for name, size in rest.items()}  # fmt: skip
    sizes["activations"] = activations
    return {name: size for name, size in sizes.items() if size > 0}


def _with_messages(priced: Priced, device: Device) -> Timeline:
    """The timeline of a program with the delay by its messages, which on a CPU take time of the computing core."""
    timeline = priced.run()
    comms = [info_of(kernel.node).comm for kernel in priced.kernels]
    ends = sum(comm is not None and comm.kind in ("send", "recv") for comm in comms)
    message_s = ends * device.cpu.message_s / 2
    if not message_s or not timeline.at:
        return timeline
    return replace(
        timeline, seconds=timeline.seconds + message_s, slowed_s=timeline.slowed_s + message_s,
        at=[*timeline.at[:-1], timeline.at[-1] + message_s],
        events=[event if event.end <= timeline.at[-1] else event._replace(end=event.end + message_s)
                for event in timeline.events],
    )  # fmt: skip


def _until_handed_over(timeline: Timeline) -> float:
    """Seconds until a program has computed what it sends; the sends themselves overlap with the next program."""
    return timeline.at[-1] if timeline.at else 0.0


def _send_delay(priced: Priced, timeline: Timeline) -> float:
    """Seconds after a program's end until what it sends has arrived."""
    sends = {i for i, kernel in enumerate(priced.kernels) if (c := info_of(kernel.node).comm) is not None and
             c.kind == "send"}  # fmt: skip
    ends = [event.end for event in timeline.events if event.task in sends]
    return max(0.0, max(ends, default=0.0) - _until_handed_over(timeline))


def _without_last_sends(timeline: Timeline) -> Timeline:
    """The timeline without the sends at its end, which overlap with the next program."""
    waits = sum(event.end - event.start for event in timeline.events if event.lane == "wait")
    return replace(timeline, seconds=_until_handed_over(timeline), exposed_s=waits)
