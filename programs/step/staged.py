"""A training step in pipeline stages: the programs of each device, cut from the micro-batch's program."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.optimizers.adamw import gradient_squares, treatments
from tpshard.parallelism.graph import Place, Value, mark
from tpshard.parallelism.mesh import Axis
from tpshard.parallelism.partitioning.partitioner import mark_outputs, partition_graph
from tpshard.parallelism.passes.run import Pass, run
from tpshard.parallelism.pipeline.schedules import Table, make
from tpshard.parallelism.pipeline.stages import Stage, blocks_of, cut
from tpshard.parallelism.program import INFO, Info, Port, Program, Spec, make_collective
from tpshard.parallelism.propagated import Annotation
from tpshard.parallelism.propagation.propagate import propagate
from tpshard.parallelism.sharding import Layout, replicated
from tpshard.parallelism.tracing.capture import capture
from tpshard.parallelism.transfer import recv, send
from tpshard.parallelism.why import Demand, Through
from tpshard.programs.fit.batching import check_micro_batches
from tpshard.programs.parts import step_programs
from tpshard.programs.parts.checks import check_remat, check_reshards, traceable
from tpshard.programs.parts.memo import Memo
from tpshard.programs.parts.pass_choices import Choices, choose
from tpshard.programs.parts.passes import FEWER, remat, scheduling
from tpshard.programs.parts.step_programs import COUNT, LOSS, SUM, counters_of, trained_by
from tpshard.programs.setting.annotations import fixed, summed
from tpshard.programs.setting.naming import untrained_notes
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import alike
from tpshard.programs.step.splitting import balance_stages, layers_of

aten = torch.ops.aten


@dataclass(frozen=True)
class DevicePrograms:
    """The programs that one device of a pipeline runs once per step, besides its stages."""

    names: tuple[str, ...]
    """The parameters of its stages, in the order of the whole program."""
    trained: tuple[str, ...]
    """Those of `names` with a gradient, from any device."""
    totals: Program
    """(gradient sums; loss, token count and counters per micro-batch, from the last stage) -> (the squared norm of the
    gradients that no earlier device has; the totals of the others on all devices)."""
    update: Program
    """The update of `TrainingPrograms`, with the devices' squared norms as an additional last input."""
    gather: Program | None = None
    reduce: Program | None = None
    exchange: Program | None = None
    """Adds up the sums of parameters that several devices have (tied embeddings)."""


@dataclass(frozen=True)
class StagedPrograms:
    """The programs of a training step in pipeline stages. Each runs on the ranks that share an index along `axis`."""

    setting: Setting
    axis: Axis
    table: Table
    layers: tuple[int, ...]
    """Layers of each stage."""
    stages: tuple[Stage, ...]
    devices: tuple[DevicePrograms, ...]
    storage: Mapping[str, Layout]

    @property
    def balanced(self) -> bool:
        """Whether the layers are split by their times; otherwise the recipe gives the split."""
        section = self.setting.recipe.pipeline
        return section is not None and section.split is None

    def sum_ports(self, device: int) -> list[Port]:
        """The gradient sums that a device keeps while its stages run, one for each of its trained parameters.

        Where only other devices compute a parameter's gradient, its sum stays zero until the exchange, laid out as the
        next program expects it.
        """
        own = self.devices[device]
        backward = [program for stage in self.table.stages_of(device) for program in self.stages[stage].backward]
        in_backward = {port.name: port for program in backward for port in program.inputs if port.kind == "gradient"}
        after = (own.totals if own.reduce is None else own.reduce).inputs[: len(own.trained)]
        names = [name + SUM for name in own.trained]
        return [in_backward.get(name) or replace(port, name=name, kind="gradient") for name, port in zip(names, after)]

    @cached_property
    def evaluation(self) -> tuple[Stage, ...]:
        """The forward stages of an evaluation, built on first use."""
        whole = step_programs.evaluate_program(self.setting, self.storage)
        return tuple(_finish(self.setting, stage) for stage in cut(whole, self.axis, self.layers))

    @cached_property
    def share(self) -> Program:
        """The program that gives all devices of the pipeline the (loss, token count) of the last stage."""

        def step(loss: Tensor, count: Tensor) -> Any:
            return [loss, count]

        scalars = [torch.empty((), dtype=d, device="meta") for d in (torch.float32, torch.int64)]
        graph = capture(step, scalars, ["loss", "count"])
        mark_outputs(graph)
        annotations = {value: summed(value, self.axis) for value in graph.inputs}
        annotations |= {value: _on_all_devices(value) for value in graph.outputs}
        mark([*graph.inputs, *graph.outputs], "scalar")
        return partition_graph(propagate(graph, self.setting.mesh, annotations)).with_results([LOSS, COUNT])

    @property
    def programs(self) -> dict[str, Program]:
        """All programs of a step or an evaluation, by role."""
        by_role: dict[str, Program] = {}
        for stage in self.stages:
            kinds = ("forward", "backward", "gradients of weights")
            by_role |= {f"{kind} of stage {stage.index}": of_stage for kind, of_stage in zip(kinds, stage.programs)}
        by_role |= {f"evaluation of stage {stage.index}": stage.forward for stage in self.evaluation}
        for i, device in enumerate(self.devices):
            once = {"totals": device.totals, "update": device.update, "gather": device.gather, "reduce": device.reduce,
                    "exchange": device.exchange}  # fmt: skip
            by_role |= {f"{role} of device {i}": program for role, program in once.items() if program is not None}
        return by_role | {"share": self.share}

    @property
    def transferring(self) -> dict[int, list[Program]]:
        """The programs of each device that may send or receive."""
        by_device: dict[int, list[Program]] = {}
        for i, device in enumerate(self.devices):
            stages = [of[stage] for of in (self.stages, self.evaluation) for stage in self.table.stages_of(i)]
            exchange = [] if device.exchange is None else [device.exchange]
            by_device[i] = [program for stage in stages for program in stage.programs] + exchange
        return by_device

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """A hash of each of the pipeline's programs, and of its schedule with what each device holds, by name."""
        blocks, held = [stage.blocks for stage in self.stages], [device.names for device in self.devices]
        schedule = self.axis, self.layers, self.table.rows, blocks, held
        table = hashlib.sha256(repr(schedule).encode()).hexdigest()
        fingerprints = {f"program of {role}": program.fingerprint for role, program in self.programs.items()}
        return {"schedule": table} | fingerprints


def build(
    setting: Setting, make_micro: step_programs.MicroMaker = alike.micro, memo: Memo | None = None
) -> tuple[Program, StagedPrograms]:
    """The micro-batch's program of a recipe with a pipeline, and its stages. memo: keeps what other settings may share.

    Raises Mistakes where stages, layers and micro-batches do not fit each other.
    """
    table = table_of(setting)
    with traceable(setting):
        base = make_micro(setting, None)
    storage = {p.name: p.layout for p in base.inputs if p.kind == "parameter"}
    layers = layers_of(setting, len(blocks_of(base)), table.stages)
    again = recompute_uncut(setting, base, make_micro)

    def stages_of(layers: Sequence[int]) -> tuple[Stage, ...]:
        return finished_stages(setting, again, table, layers)

    layers, stages = balance_stages(setting, layers, table.devices, stages_of)
    held, trained = held_by_devices(table, [stage.parameters for stage in stages], list(storage)), trained_by(base)
    devices = tuple(
        device_programs(setting, storage, base, held, i, trained, counters_of(base), memo) for i in range(table.devices)
    )
    return again, StagedPrograms(setting, setting.stage_axis, table, tuple(layers), stages, devices, storage)


def recompute_uncut(setting: Setting, base: Program, make_micro: step_programs.MicroMaker) -> Program:
    """The micro-batch's program before it is cut into stages: with the recipe's gathering, reducing and recomputation.
    `base` is the program without them, of which only the records are read if it gathers or reduces once a step."""
    whole = make_micro(setting, base) if setting.gathers_once or setting.reduces_once else base
    check_remat(setting, whole)
    notes = [*check_reshards(setting, whole), *setting.notes, *untrained_notes(setting.model, trained_by(whole))]
    whole = replace(whole, warnings=[*whole.warnings, *notes])
    return run([remat(setting, setting.recipe.fsdp.reshard_after_forward is not False)], whole)


def finished_stages(
    setting: Setting, again: Program, table: Table, layers: Sequence[int], only: Collection[int] | None = None
) -> tuple[Stage, ...]:
    """Cuts a program with recomputation into stages and applies their passes. only: the indices to return, if not all.

    Raises Mistakes where it cannot be cut.
    """
    try:
        cuts = cut(again, setting.stage_axis, layers, split_backward=table.splits_backward)
    except ValueError as error:
        raise Mistakes.one(
            f"the model cannot be cut into stages: {error}", exit=Exit.FIT, where=setting.recipe.where("pipeline"),
            fix="leave `pipeline` out, or another model",
        ) from error  # fmt: skip
    return tuple(_finish(setting, stage) for stage in cuts if only is None or stage.index in only)


def device_programs(
    setting: Setting, storage: Mapping[str, Layout], base: Program, held: Sequence[Sequence[str]], i: int,
    all_trained: Collection[str], noted: int, memo: Memo | None = None,
) -> DevicePrograms:  # fmt: skip
    """The programs that device `i` runs once per step.

    held: the parameters of every device. noted: the number of counters.
    """
    names, gathers, reduces = held[i], setting.gathers_once, setting.reduces_once
    trained = [n for n in names if n in all_trained]
    first = [n for n in trained if all(n not in before for before in held[:i])]
    shared = [n for n in trained if sum(n in other for other in held) > 1]
    return DevicePrograms(
        tuple(names),
        tuple(trained),
        totals_program(setting, storage, trained, first, noted),
        step_programs.update_program(setting, storage, trained, memo, staged=True),
        step_programs.gather_program(setting, base, storage, names, memo) if gathers else None,
        step_programs.reduce_program(setting, base, storage, trained, memo) if reduces else None,
        exchange_program(setting, storage, i, held, shared) if shared else None,
    )


def table_of(setting: Setting) -> Table:
    """The schedule of a recipe. Raises Mistakes (exit 4) where it does not support the number of micro-batches."""
    section, axis = setting.recipe.pipeline, setting.stage_axis
    assert section is not None
    check_micro_batches(setting.recipe, setting.batch, axis.size)
    return make(section.schedule, axis.size, setting.batch.micro_batches, section.stages_per_device)


def _finish(setting: Setting, stage: Stage) -> Stage:
    """Merges the collectives of a stage's programs into buckets and schedules them: backward programs by the buckets of
    the forward one, which reads all parameters.
    """
    stage = _run_passes(stage, FEWER)
    return _run_passes(stage, scheduling(setting, _choices_of(setting, stage)))


def _choices_of(setting: Setting, stage: Stage) -> Choices:
    @cache
    def program_with(chosen: Choices) -> Program:
        return run(scheduling(setting, chosen), stage.forward)

    chosen = choose(setting, lambda _: stage.forward, program_with)
    in_buckets = {name for group in chosen.buckets for name in group}
    alone = tuple((name,) for name in stage.parameters if name not in in_buckets)
    return chosen._replace(buckets=(*chosen.buckets, *alone))


def _run_passes(stage: Stage, passes: Sequence[Pass]) -> Stage:
    backward = tuple(run(passes, program) for program in stage.backward)
    return replace(stage, forward=run(passes, stage.forward), backward=backward)


class PassedStages(NamedTuple):
    """The stages of a pipeline after one pass."""

    name: str
    """The name of the pass."""
    seconds: float
    """Seconds that the pass took on all stages."""
    pipeline: StagedPrograms


def between_passes(setting: Setting, again: Program, pipeline: StagedPrograms) -> Iterator[PassedStages]:
    """Yields the stages as they are cut, then after each pass. again: the micro-batch's program with recomputation."""
    stages = cut(again, pipeline.axis, pipeline.layers, split_backward=pipeline.table.splits_backward)
    chosen = [_choices_of(setting, _run_passes(stage, FEWER)) for stage in stages]
    lists = [[*FEWER, *scheduling(setting, each)] for each in chosen]
    yield PassedStages("recompute", 0.0, replace(pipeline, stages=stages))
    for each in zip(*lists):
        started = time.perf_counter()
        stages = tuple(_run_passes(stage, [one]) for stage, one in zip(stages, each))
        first = each[0].func if isinstance(each[0], partial) else each[0]
        yield PassedStages(first.__name__, time.perf_counter() - started, replace(pipeline, stages=stages))


def held_by_devices(table: Table, of_stage: Sequence[Iterable[str]], names: Sequence[str]) -> list[list[str]]:
    """The parameters of each device in the order of `names`. of_stage: those of each stage."""
    held = []
    for device in range(table.devices):
        on_device = {name for stage in table.stages_of(device) for name in of_stage[stage]}
        held.append([name for name in names if name in on_device])
    return held


# ---- what a device runs once a step ----------------------------------------------------------------------------------
def _on_all_devices(value: Value) -> Annotation:
    return fixed(replicated(value.rank), "the same on all devices")


def totals_program(
    setting: Setting, storage: Mapping[str, Layout], names: Sequence[str], first: Sequence[str], noted: int
) -> Program:
    """Builds the program that adds up losses, counts and squared gradient norms over all stages.

    first: the names whose gradients count on this device. noted: the number of counters.
    """
    shapes = {name: p.shape for name, p in setting.model.named_parameters()}
    treated = treatments({name: tuple(shapes[name]) for name in first}, setting.balanced)
    micros = setting.batch.micro_batches

    def step(sums: list[Tensor], losses: Tensor, counts: Tensor, *others: Tensor) -> Any:
        grads = dict(zip(names, sums))
        squares = gradient_squares([grads[n] for n in first], counts.sum(), list(treated.values()))
        return [squares, losses, counts, *others]

    sums = [torch.empty(shapes[name], dtype=setting.sum_dtype, device="meta") for name in names]
    totals = [torch.empty(micros, dtype=d, device="meta") for d in (torch.float32, torch.int64)]
    totals += [torch.empty(noted, dtype=torch.float32, device="meta")] * (noted > 0)
    labels = [*(n + SUM for n in names), "losses", "counts", *["counters"] * (noted > 0)]
    graph = capture(step, (sums, *totals), labels)
    for op in graph.ops:
        op.place = Place(phase="update")
    mark_outputs(graph)
    annotations = {value: fixed(storage[name], "how it is stored") for value, name in zip(graph.inputs, names)}
    annotations |= {value: summed(value, setting.stage_axis) for value in graph.inputs[len(names) :]}
    annotations |= {value: _on_all_devices(value) for value in graph.outputs}
    mark(graph.inputs[: len(names)], "gradient")
    mark([*graph.inputs[len(names) :], *graph.outputs], "scalar")
    program = partition_graph(propagate(graph, setting.mesh, annotations))
    return program.with_results([("scalar", label) for label in ("squares", *labels[len(names) :])])


def exchange_program(
    setting: Setting, storage: Mapping[str, Layout], me: int, held: Sequence[Sequence[str]], names: Sequence[str]
) -> Program:
    """Sends the sums of shared parameters to the other devices that have them, and adds them up.

    The order of the sum is that of the devices, so that all get the same bits.
    """
    mesh, axes, dtype = setting.mesh, (setting.stage_axis,), setting.sum_dtype
    shapes = {name: tuple(p.shape) for name, p in setting.model.named_parameters()}
    graph, inputs, outputs, place = fx.Graph(), [], [], Place(phase="update")
    feeds: dict[tuple[str, int], fx.Node] = {}
    for name in names:
        for other, other_names in enumerate(held):
            if name in other_names:
                kind, label = ("gradient", "") if other == me else ("received", f"@{other}")
                port = Port(f"{name}{SUM}{label}", shapes[name], dtype, storage[name], kind)
                feeds[name, other] = graph.placeholder(port.name.replace(".", "_").replace("@", "_of_"))
                feeds[name, other].meta[INFO] = Info((Spec(port.local, dtype),), origin=port.name)
                inputs.append(port)

    def communicate(target: Any, value: fx.Node, name: str, label: str, other: int) -> fx.Node:
        node = graph.call_function(target, (value, other - me))
        spec = value.meta[INFO].specs[0]
        demand = Demand("sent" if target is send else "received", Through(name, "boundary"), label, stage=other)
        comm = make_collective(
            mesh, target.__name__, axes, spec.bytes, dtype, why=(demand,), value=(label,), of="gradient"
        )
        node.meta[INFO] = Info((spec,), label, place, comm=comm)
        return node

    sends = {key: communicate(send, feeds[key[0], me], key[0], f"{key[0]}{SUM}@{me}", key[1])
            for key in feeds if key[1] != me}  # fmt: skip
    for name in names:
        total: fx.Node | None = None
        for other in (other for shared, other in feeds if shared == name):
            label = f"{name}{SUM}@{other}"
            feed = feeds[name, other]
            part = feed if other == me else communicate(recv, feed, name, label, other)
            if total is not None:
                both = graph.call_function(aten.add.Tensor, (total, part))
                both.meta[INFO] = Info(part.meta[INFO].specs, label, place)
                part = both
            total = part
        assert total is not None
        outputs.append((total, Port(name + SUM, shapes[name], dtype, storage[name], "gradient")))
    outputs += [(node, Port(f"{name}{SUM}@{me}", shapes[name], dtype, storage[name], "sent"))
                for (name, _), node in sends.items()]  # fmt: skip
    end = graph.output(tuple(node for node, _ in outputs))
    end.meta[INFO] = Info(())
    return Program(mesh, graph, tuple(inputs), tuple(port for _, port in outputs))
