"""Prices a training step: its programs, and with stages the tasks of the schedule and the waiting of the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.pipeline import core_turns
from tpshard.parallelism.pipeline.core_turns import host_shares
from tpshard.parallelism.pipeline.schedules import Slot, StageTask
from tpshard.parallelism.pipeline.stepping import program_of
from tpshard.parallelism.pricing.communicators import communicator_bytes
from tpshard.parallelism.pricing.cost import Device, collective
from tpshard.parallelism.pricing.flow import info_of
from tpshard.parallelism.pricing.fusion import Compiled
from tpshard.parallelism.pricing.network import Topology
from tpshard.parallelism.pricing.timeline import Priced, Timeline, price
from tpshard.plan.step.figures import DevicePrice, PricedPipeline, StagePrice
from tpshard.plan.step.pricing import PricedPart, Pricing, StepPart, flops_of, memory_of, peak_of, price_part
from tpshard.plan.step.reserve import Replay, Turn
from tpshard.programs.parts.held import CATEGORIES, activations, beside, bytes_of, stored_ports
from tpshard.programs.parts.pass_choices import compiled_by
from tpshard.programs.setting import cluster
from tpshard.programs.step.training_step import TASKS, TrainingPrograms, part_of

BETWEEN_STAGES = ("send", "recv")
"""Transfers of a pipeline, which a run does not count as collectives."""
StageRuns = dict[tuple[str, int], tuple[Priced, Timeline]]
"""The price of one run of each program of a stage, by kind and stage."""


def price_training(programs: TrainingPrograms, compiled: Compiled | None = None) -> Pricing:
    """Prices a training step on the recipe's device. `compiled` overrides the recipe's setting."""
    recipe = programs.setting.recipe
    device, _, per_host = cluster.device_of(recipe)
    pricing = price_step(programs, device, per_host, compiled or compiled_by(recipe))
    return replace(pricing, limit=recipe.fsdp.memory_limit)


def price_step(programs: TrainingPrograms, whole: Device, per_host: int, compiled: Compiled) -> Pricing:
    """Prices every program once, then simulates the table of tasks with these times.

    whole: the device before processes share it. On a CPU with more processes than cores, a stage's seconds are those on
    a core of its own, and the schedule has the turns that stages take.
    """
    table, device = programs.table, whole.shared_by(per_host)
    own = whole.with_own_core(per_host) if table.devices > 1 else device
    runs = _price_stages(programs, own, per_host, compiled)

    def seconds(task: StageTask) -> float:
        return _until_handed_over(runs[task.kind, task.stage][1])

    by_name = {part_of(*key): run for key, run in runs.items()}
    devices, parts_of, peaks = [], [], []
    for i, mine in enumerate(programs.devices):
        parts, peak = _price_device(programs, i, by_name, device, per_host, compiled)
        once_s = sum(p.seconds for p in parts if p.part.name in mine.by_role)
        busy_s = sum(map(seconds, table.rows[i]))
        devices.append(DevicePrice(busy_s, once_s, peak.memory.peak_bytes, table.most_held(i), *_sent(parts)))
        parts_of.append(parts)
        peaks.append(peak)
    late = {key: _send_delay(*run) for key, run in runs.items()}
    slots = _timetable(programs, own, per_host, seconds, lambda task: late[task.kind, task.stage])
    pipeline = PricedPipeline(table, slots, _stage_prices(programs, runs, late), devices, programs.balanced)
    parts, mesh = parts_of[pipeline.slowest], programs.setting.mesh
    topology = Topology(mesh, per_host)
    further = max(communicator_bytes([part.part.program for part in each], device, topology) for each in parts_of)
    with_groups = replace(device, context_bytes=device.context_bytes + further)
    fixed_s = _looping(device, mesh, per_host) + sum(part.mapped_s(device) for part in parts)
    worst = peak_of(peaks)
    fullest = next(i for i, peak in enumerate(peaks) if peak is worst)
    return Pricing(
        with_groups, parts, fixed_s, worst, sum(flops_of(each)[1] for each in parts_of), pipeline.idle_s,
        pipeline if programs.cuts else None,
        replay=_replay(programs, fullest, parts_of[fullest]) if device.kind == "gpu" else None,
    )  # fmt: skip


def _replay(programs: TrainingPrograms, place: int, parts: Sequence[PricedPart]) -> Replay:
    """What a device allocates in a step, up to the micro-batches after which it allocates the same again."""
    mine, table = programs.devices[place], programs.table
    by_name = {part.part.name: part for part in parts}
    tasks = list(table.rows[place])[: len(table.kinds) * (table.most_held(place) + 2)]
    names = [part_of(task.kind, task.stage) for task in tasks]
    of_tasks = {part_of(task.kind, task.stage) for task in table.rows[place]}
    order = [part for part in parts if part.part.name not in of_tasks]
    before = [part for part in order if part.part.name == "gather"]
    after = [part for part in order if part.part.name != "gather"]
    last = len(before) + len(names) + len(after) - 1
    turns = [Turn(part.memory, last) for part in before]
    following: dict[tuple[int, int], int] = {}
    of_task: list[Turn] = []
    for i, (task, name) in reversed([*enumerate(zip(tasks, names), len(before))]):
        part, key = by_name[name], (task.stage, task.micro)
        kinds = {port.kind for port in part.part.program.outputs}
        later = following.get(key, last)
        shared = 0
        if task.kind == "I":  # what the forward pass saved for W too
            needed = bytes_of(program_of(programs.stages, task._replace(kind="W")).inputs, "saved")
            shared = max(0, needed - bytes_of(part.part.program.outputs, "saved"))
        until = later if "saved" in kinds or shared else last if "gradient" in kinds else i
        of_task.append(Turn(part.memory, until, shared))
        following[key] = i
    turns += reversed(of_task)
    turns += [Turn(part.memory, last) for part in after]
    stored = stored_ports(programs.setting, programs.storage, mine.names)
    summed = any(port.kind == "gradient" for name in of_tasks for port in by_name[name].part.program.inputs)
    beside = [port for port in mine.update.inputs if port.kind == "optimizer" or (summed and port.kind == "gradient")]
    static = [port.local_bytes for port in (*stored, *beside)]
    return Replay(static, turns)


def _looping(device: Device, mesh: Mesh, per_host: int) -> float:
    """Seconds of the training loop per step: the host's own work, and the agreement of all ranks to continue."""
    everyone = mesh.sorted(mesh.axis(name) for name in mesh.axes)
    return device.overhead.step_s + collective(device, Topology(mesh, per_host), "all_reduce", everyone, 8).seconds


def training_parts(programs: TrainingPrograms, compiled: Compiled, place: int = 0) -> list[StepPart]:
    """The programs that a device runs in a step, in order, with what stays in memory beside each: of a stage's, when it
    first runs."""
    mine = programs.devices[place]
    held = {CATEGORIES[kind]: bytes_of(mine.update.inputs, kind) for kind in ("gradient", "optimizer")}
    held["parameters"] = bytes_of(stored_ports(programs.setting, programs.storage, mine.names), "parameter")
    gathered = held["parameters"] + bytes_of(mine.gather.outputs if mine.gather is not None else (), "parameter")
    tasks: dict[str, StepPart] = {}
    for task, others, _ in activations(programs.table, programs.stages, place):
        name, program = part_of(task.kind, task.stage), program_of(programs.stages, task)
        if name not in tasks:
            others_too = beside(held | {"parameters": gathered}, program, others)
            tasks[name] = StepPart(name, program, programs.table.micro_batches, others_too, compiled)
    once = {role: StepPart(role, program, 1, beside(held, program), compiled)
            for role, program in mine.by_role.items()}  # fmt: skip
    before = [once.pop("gather")] if "gather" in once else []
    return [*before, *tasks.values(), *once.values()]


def _price_stages(programs: TrainingPrograms, device: Device, per_host: int, compiled: Compiled) -> StageRuns:
    """Prices the programs of all stages, each of those that several stages share once."""
    runs: StageRuns = {}
    of_program: dict[int, tuple[Priced, Timeline]] = {}
    for stage in programs.stages:
        for kind, program in zip(programs.table.kinds, stage.programs):
            if id(program) not in of_program:
                priced = price(program, device, per_host, compiled=compiled)
                of_program[id(program)] = (priced, _with_messages(priced, device))
            runs[kind, stage.index] = of_program[id(program)]
    return runs


def _timetable(
    programs: TrainingPrograms, device: Device, per_host: int, seconds: Callable[[StageTask], float],
    send_delay: Callable[[StageTask], float],
) -> list[Slot]:  # fmt: skip
    """The time of every task; stages take turns on the cores of a CPU that has fewer than processes."""
    table, cores = programs.table, device.cpu.cores
    if table.devices > 1 and device.kind == "cpu" and 0 < cores < per_host:
        shares = host_shares(programs.setting.mesh, programs.setting.stage_axis, per_host)
        return core_turns.timetable(table, seconds, send_delay, shares, cores)
    return table.timetable(seconds, send_delay)


def _stage_prices(
    programs: TrainingPrograms, runs: StageRuns, late: Mapping[tuple[str, int], float]
) -> list[StagePrice]:
    table, prices = programs.table, []
    for stage in programs.stages:
        sent = (info_of(n).comm for program in stage.programs for n in program.graph.nodes)
        prices.append(
            StagePrice(
                stage.index, table.device_of(stage.index), programs.layers[stage.index] if programs.layers else 0,
                bytes_of(stage.forward.outputs, "saved"),
                sum(c.bytes for c in sent if c is not None and c.kind == "send"),
                late[table.kinds[0], stage.index],
                {TASKS[kind]: _until_handed_over(runs[kind, stage.index][1]) for kind in table.kinds},
            )
        )  # fmt: skip
    return prices


def _price_device(
    programs: TrainingPrograms, place: int, runs: Mapping[str, tuple[Priced, Timeline]], device: Device, per_host: int,
    compiled: Compiled,
) -> tuple[list[PricedPart], PricedPart]:  # fmt: skip
    """The programs that one device of a pipeline runs in a step, and the one in which its memory peaks."""
    parts: dict[str, PricedPart] = {}
    for part in training_parts(programs, compiled, place):
        if part.name in runs:
            priced, timeline = runs[part.name]
            done = PricedPart(part, priced, timeline, memory_of(part, priced, device))
        else:
            done = price_part(part, device, per_host)
        parts[part.name] = replace(done, timeline=_without_last_sends(done.timeline))

    def peak(entry: tuple[PricedPart, int]) -> int:
        done, held = entry
        return done.memory.peak_bytes - done.part.always.get("activations", 0) + held

    held_beside = activations(programs.table, programs.stages, place)
    tasks = ((parts[part_of(task.kind, task.stage)], others + own) for task, others, own in held_beside)
    tallest, held = max(tasks, key=peak)
    part = replace(tallest.part, always={**tallest.part.always, "activations": held})
    peak_part = replace(tallest, part=part, memory=memory_of(part, tallest.priced, device))
    return list(parts.values()), peak_of([peak_part, *parts.values()])


def _sent(parts: list[PricedPart]) -> tuple[int, int]:
    """(collectives without those between stages, bytes sent) of the programs that a device runs in a step."""
    count = sent = 0
    for entry in parts:
        for _, comm, cost, _ in entry.collectives():
            count += entry.part.times * (comm.kind not in BETWEEN_STAGES)
            sent += entry.part.times * cost.wire_bytes
    return count, sent


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
