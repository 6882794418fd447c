"""The programs that a device runs once per step: gathering, reducing, the exchange of sums, totals and the update."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from tpshard.models.optimizers.adamw import gradient_squares, treatments
from tpshard.parallelism.graph import Place, Value, mark
from tpshard.parallelism.partitioning.partitioner import mark_outputs, partition_graph
from tpshard.parallelism.pipeline.schedules import Table
from tpshard.parallelism.program import INFO, Info, Port, Program, Spec, make_collective
from tpshard.parallelism.propagated import Annotation
from tpshard.parallelism.propagation.propagate import propagate
from tpshard.parallelism.resharding.new_nodes import identifier
from tpshard.parallelism.sharding import Layout, replicated
from tpshard.parallelism.tracing.capture import capture
from tpshard.parallelism.transfer import recv, send
from tpshard.parallelism.why import Demand, Through
from tpshard.programs.parts import step_programs
from tpshard.programs.parts.held import stored_bytes
from tpshard.programs.parts.memo import Memo
from tpshard.programs.parts.step_programs import COUNT, LOSS, SUM
from tpshard.programs.parts.update_program import update_program
from tpshard.programs.setting.annotations import fixed, summed
from tpshard.programs.setting.setting import Setting

aten = torch.ops.aten


@dataclass(frozen=True)
class DevicePrograms:
    """The programs that one device of a pipeline, or every device without one, runs once per step."""

    names: tuple[str, ...]
    """The parameters of its stages, in the order of the whole program."""
    trained: tuple[str, ...]
    """Those of `names` with a gradient, from any device."""
    update: Program
    """(trained parameters, their gradient sums and moments, `loss_sum`, `count`, `lr`, `update`, which is its number
    from 1, and with stages `squares`) -> (new parameters and moments (donated), `grad_norm`, `finite`)."""
    gather: Program | None = None
    """`accumulate.gather: step`: stored parameters -> gathered ones, which are then the inputs of its stages."""
    reduce: Program | None = None
    """`accumulate.reduce: last`: the unreduced sums that its stages leave -> stored sums."""
    exchange: Program | None = None
    """Adds up the sums of parameters that several devices have (tied embeddings)."""
    totals: Program | None = None
    """With stages: (gradient sums; `losses`, `counts` and `counters` of the last stage) -> (`squares`, the squared norm
    of the gradients that no earlier device has; the totals of the others on all devices)."""

    @property
    def by_role(self) -> dict[str, Program]:
        """The programs in the order in which they run."""
        roles = {"gather": self.gather, "reduce": self.reduce, "exchange": self.exchange, "totals": self.totals,
                 "update": self.update}  # fmt: skip
        return {role: program for role, program in roles.items() if program is not None}


def device_programs(
    setting: Setting, storage: Mapping[str, Layout], base: Program, held: Sequence[Sequence[str]], i: int,
    all_trained: Collection[str], counters: int, memo: Memo | None = None,
) -> DevicePrograms:  # fmt: skip
    """The programs that device `i` runs once per step.

    base: the micro-batch's program before parameters are gathered, or gradients reduced, once per step. held: the
    parameters of every device. counters: the number of values that the model counts.
    """
    names, staged = held[i], setting.recipe.staged
    trained = [n for n in names if n in all_trained]
    first = [n for n in trained if all(n not in before for before in held[:i])]
    stored = stored_bytes(setting, storage, names, trained)
    shared = [n for n in trained if sum(n in other for other in held) > 1]
    return DevicePrograms(
        tuple(names),
        tuple(trained),
        update_program(setting, storage, trained, memo, staged=staged),
        step_programs.gather_program(setting, base, storage, names, memo, stored) if setting.gathers_once else None,
        step_programs.reduce_program(setting, base, storage, trained, memo, stored) if setting.reduces_once else None,
        exchange_program(setting, storage, i, held, shared) if shared else None,
        totals_program(setting, storage, trained, first, counters) if staged else None,
    )


def held_by_devices(table: Table, of_stage: Sequence[Iterable[str]], names: Sequence[str]) -> list[list[str]]:
    """The parameters of each device in the order of `names`. of_stage: those of each stage."""
    held = []
    for device in range(table.devices):
        on_device = {name for stage in table.stages_of(device) for name in of_stage[stage]}
        held.append([name for name in names if name in on_device])
    return held


def _on_all_devices(value: Value) -> Annotation:
    return fixed(replicated(value.rank), "the same on all devices")


def totals_program(
    setting: Setting, storage: Mapping[str, Layout], names: Sequence[str], first: Sequence[str], counters: int
) -> Program:
    """Builds the program that adds up losses, counts and squared gradient norms over all stages.

    first: the names whose gradients count on this device. counters: the number of values that the model counts.
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
    totals += [torch.empty(counters, dtype=torch.float32, device="meta")] * (counters > 0)
    labels = [*(n + SUM for n in names), "losses", "counts", *["counters"] * (counters > 0)]
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
                feeds[name, other] = graph.placeholder(identifier(port.name.replace("@", "_of_")))
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


def share_program(setting: Setting) -> Program:
    """Builds the program that gives all devices of a pipeline the (loss, token count) of its last stage."""

    def step(loss: Tensor, count: Tensor) -> Any:
        return [loss, count]

    scalars = [torch.empty((), dtype=d, device="meta") for d in (torch.float32, torch.int64)]
    graph = capture(step, scalars, ["loss", "count"])
    mark_outputs(graph)
    annotations = {value: summed(value, setting.stage_axis) for value in graph.inputs}
    annotations |= {value: _on_all_devices(value) for value in graph.outputs}
    mark([*graph.inputs, *graph.outputs], "scalar")
    return partition_graph(propagate(graph, setting.mesh, annotations)).with_results([LOSS, COUNT])
