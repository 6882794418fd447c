"""A training run of all ranks in this process, in lock-step and float64, for comparing two ways to train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tpshard.parallelism.pipeline.stepping import ranks_of, simulate_step
from tpshard.parallelism.program import Port, PortKey, Program
from tpshard.parallelism.simulate import cut, join, run_lockstep
from tpshard.programs.compare.float64 import float64
from tpshard.programs.parts.step_programs import COUNTERS, SUM, seeds
from tpshard.programs.parts.update_program import update_program
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.training_step import TrainingPrograms

Parts = list[Tensor]
"""A value's local tensor on each rank."""
Values = dict[PortKey, Parts]


@dataclass(frozen=True)
class StepValues:
    """The results of one optimizer step as whole tensors, in float64."""

    loss: float
    """Loss per target token."""
    grad_norm: float
    gradients: dict[str, Tensor]


def normal_weights(setting: Setting) -> dict[str, Tensor]:
    """Weights of single layers: normal random numbers of deviation 0.2, the same for every mesh."""
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(p.shape, generator=random, dtype=torch.float64) * 0.2
            for name, p in setting.single.named_parameters()}  # fmt: skip


def stacked(setting: Setting, name: str, single: Mapping[str, Tensor]) -> Tensor:
    """A parameter of the programs, stacked from those of single layers if the pipeline is vectorized."""
    members = setting.members(name)
    return single[name] if members is None else torch.stack([single[member] for member in members])


class RandomBatches:
    """Draws the batches of steps, the same on every mesh with the same sequences per step.

    Tokens are uniform over `vocab`; a task without text (`vocab` is None) generates its own rows.
    """

    def __init__(self, setting: Setting, vocab: int | None):
        self.setting, self.vocab, self.drawn = setting, vocab, 0
        self.random = torch.Generator().manual_seed(1)

    def next(self) -> list[dict[PortKey, Tensor]]:
        """The fields of each micro-batch of the next step, all data ranks' rows together, floats in float64."""
        plan, fields = self.setting.batch, self._rows()
        shape = plan.data_ranks, plan.micro_batches, plan.per_device
        dealt = {("batch", name): field.unflatten(0, shape).transpose(0, 1).flatten(1, 2)
                 for name, field in fields.items()}  # fmt: skip
        return [{key: field[micro] for key, field in dealt.items()} for micro in range(plan.micro_batches)]

    def _rows(self) -> dict[str, Tensor]:
        """The next step's fields, each [global_sequences, ...]."""
        task, count, length = self.setting.task, self.setting.batch.global_sequences, self.setting.seq_len
        if self.vocab is None:
            first, self.drawn = self.drawn, self.drawn + count
            fields = task.rows(range(first, first + count), seed=0)
            return {n: (t.double() if t.is_floating_point() else t) for n, t in ((n, fields[n]) for n in task.fields)}
        tokens, targets = torch.randint(0, self.vocab, (2, count, length), generator=self.random)
        positions = torch.arange(length).expand(count, length)
        texts = {"tokens": tokens, "targets": targets, "documents": torch.zeros_like(positions), "positions": positions}
        return {name: texts[name] for name in task.fields}


class Lockstep:
    """Trains all ranks of a recipe together in this process, from `normal_weights` on `RandomBatches`.

    Stages run in the order of the schedule. Update and norm are those of the whole model, since devices with different
    programs cannot run in lock-step.
    """

    def __init__(self, programs: TrainingPrograms, vocab: int | None):
        self.programs, self.setting, self.mesh = programs, programs.setting, programs.setting.mesh
        self.update = programs.update
        if programs.axis is not None:
            self.update = update_program(self.setting, programs.storage, programs.trained)
        self.ranks = [ranks_of(self.mesh, programs.axis, device) for device in range(programs.table.devices)]
        self.batches, single = RandomBatches(self.setting, vocab), normal_weights(self.setting)
        whole = {port: stacked(self.setting, port.name, single) for port in programs.stored}
        moments = (port for port in self.update.inputs if port.kind == "optimizer")
        whole |= {port: torch.zeros(port.shape, dtype=torch.float64) for port in moments}
        self.values: Values = {port.key: self.local(tensor, port) for port, tensor in whole.items()}
        """The parameters and moments."""
        self.counted: list[Parts] = []
        """What the model counted in each micro-batch of the last step."""
        self.number = 0

    def local(self, tensor: Tensor, port: Port) -> Parts:
        """Every rank's shard of a global tensor."""
        return [cut(tensor, port.layout, self.mesh, rank) for rank in range(self.mesh.ranks)]

    def join(self, ports: Sequence[Port], values: Values) -> dict[str, Tensor]:
        """Global tensors by parameter, with stacked parameters split into those of single layers."""
        whole = {port.name.removesuffix(SUM): join(port, self.mesh, values[port.key]) for port in ports}
        return {name: one for stacked, tensor in whole.items() for name, one in self._single(stacked, tensor)}

    def _single(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters of single layers out of a parameter of the programs: the inverse of `stacked`."""
        members = self.setting.members(name)
        yield from [(name, tensor)] if members is None else zip(members, tensor)

    def sums(self) -> tuple[Values, float, int]:
        """The gradients of one step as inputs of the update, its summed loss, and its number of targets."""
        programs, values = self.programs, []
        for i, (device, ranks) in enumerate(zip(programs.devices, self.ranks)):
            own = {("parameter", n): [self.values["parameter", n][rank] for rank in ranks] for n in device.names}
            used = own if device.gather is None else run(device.gather, own, ranks)
            zeros = {port.key: [torch.zeros(port.local, dtype=torch.float64) for _ in ranks]
                     for port in programs.sum_ports(i)}  # fmt: skip
            values.append(used | zeros)
        with float64():
            sums, scalars = simulate_step(programs.table, programs.stages, programs.axis, values, self._micros())
        sums = [own if device.reduce is None else run(device.reduce, own, ranks)
                for own, device, ranks in zip(sums, programs.devices, self.ranks)]  # fmt: skip
        each = [scalars[micro] for micro in sorted(scalars)]
        self.counted = [one[COUNTERS[1]] for one in each if COUNTERS[1] in one]
        loss, count = sum(float(one["loss"][0]) for one in each), sum(int(one["count"][0]) for one in each)
        return self._everywhere(sums), loss, count

    def _micros(self) -> list[list[Values]]:
        """For each device, the inputs of its programs for every micro-batch."""
        micro, batches = self.programs.micro, self.batches.next()
        ports = [port for port in micro.inputs if port.kind == "batch"]
        inputs: list[list[Values]] = [[] for _ in self.ranks]
        for number, fields in enumerate(batches):
            parts = {port.key: self.local(fields[port.key], port) for port in ports}
            drawn = seeds(self.setting, micro, self.number, number)
            for micros, ranks in zip(inputs, self.ranks):
                own = {key: [of_rank[rank] for rank in ranks] for key, of_rank in parts.items()}
                micros.append(own | {key: [seed] * len(ranks) for key, seed in drawn.items()})
        return inputs

    def _everywhere(self, sums: Sequence[Values]) -> Values:
        """Every rank's shards of all gradients: those of all pipeline devices, added up if several have a parameter."""
        shards: Values = {}
        for key in (("gradient", name + SUM) for name in self.programs.trained):
            had = [own[key] for own in sums if key in own]
            total = had[0] if len(had) == 1 else [torch.stack(parts).sum(0) for parts in zip(*had)]
            by_rank = {rank: part for ranks in self.ranks for rank, part in zip(ranks, total)}
            shards[key] = [by_rank[rank] for rank in range(self.mesh.ranks)]
        return shards

    def step(self, lr: float = 1e-2) -> StepValues:
        """Runs one whole optimizer step."""
        self.number += 1
        sums, loss, targets = self.sums()
        gradients = self.join([port for port in self.update.inputs if port.kind == "gradient"], sums)
        numbers = {"loss_sum": loss, "count": targets, "lr": lr, "update": self.number}
        scalars = {("scalar", name): [torch.tensor(value, dtype=torch.float64)] * self.mesh.ranks
                   for name, value in numbers.items()}  # fmt: skip
        results = run(self.update, self.values | sums | scalars)
        self.values |= {key: value for key, value in results.items() if key in self.values}
        return StepValues(loss / max(1, targets), float(results["scalar", "grad_norm"][0]), gradients)

    def weights(self) -> dict[str, Tensor]:
        """The current parameters as whole tensors."""
        return self.join(self.programs.stored, self.values)


def run(program: Program, values: Mapping[PortKey, Parts], ranks: Sequence[int] | None = None) -> Values:
    """Every rank's results of a program (or those of `ranks`, which alone run it), computed in float64."""
    with float64():
        results = run_lockstep(program, [list(parts) for parts in zip(*program.arguments(values))], ranks=ranks)
    return program.results([list(parts) for parts in zip(*results)])
