"""A pipelined training run of all ranks in this process; see `lockstep`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from tpshard.parallelism.draws import SEED
from tpshard.parallelism.pipeline.stepping import ranks_of, simulate_step
from tpshard.parallelism.program import Program
from tpshard.parallelism.simulate import run_lockstep
from tpshard.programs.compare.float64 import float64
from tpshard.programs.compare.lockstep import Lockstep, Parts
from tpshard.programs.parts.step_programs import SUM, seeds, update_program
from tpshard.programs.step.training import TrainingPrograms


class StagedLockstep(Lockstep):
    """Runs every stage's programs in the order of the schedule, and each device's programs that run once per step.

    Update and norm are those of the whole model, since stages with different programs cannot run in lock-step.
    """

    def __init__(self, programs: TrainingPrograms, vocab: int | None):
        assert programs.pipeline is not None
        self.pipeline = programs.pipeline
        update = update_program(programs.setting, programs.pipeline.storage, programs.trained)
        super().__init__(replace(programs, update=update), vocab)
        self.ranks = [ranks_of(self.mesh, self.pipeline.axis, d) for d in range(self.pipeline.table.devices)]

    def sums(self) -> tuple[Parts, float, int]:
        stages, table = self.pipeline.stages, self.pipeline.table
        params, sums = [], []
        for device, (programs, ranks) in enumerate(zip(self.pipeline.devices, self.ranks)):
            held = {name: [self.params[rank][self.names.index(name)] for rank in ranks] for name in programs.names}
            params.append(held if programs.gather is None else self._once(programs.gather, held, ranks))
            ports = self.pipeline.sum_ports(device)
            sums.append({p.name: [torch.zeros(p.local, dtype=torch.float64) for _ in ranks] for p in ports})
        with float64():
            scalars = simulate_step(table, stages, self.pipeline.axis, params, sums, self._batches())
        for i, (programs, ranks) in enumerate(zip(self.pipeline.devices, self.ranks)):
            if programs.reduce is not None:
                sums[i] = self._once(programs.reduce, sums[i], ranks)
        self.counted = [[parts[2][0]] for _, parts in sorted(scalars.items()) if len(parts) > 2]
        loss = sum(float(parts[0][0]) for parts in scalars.values())
        return self._everywhere(sums), loss, sum(int(parts[1][0]) for parts in scalars.values())

    def _batches(self) -> list[list[dict[str, list[Tensor]]]]:
        """For each device, the inputs of its programs for every micro-batch."""
        micro = self.programs.micro
        ports = [port for port in micro.inputs if port.kind == "batch"]
        inputs: list[list[dict[str, list[Tensor]]]] = [[] for _ in self.ranks]
        for number, fields in enumerate(self.batches()):
            parts = self.local(fields, ports)
            drawn = {SEED: seeds(self.setting, micro, self.number, number)}
            for micro_batches, ranks in zip(inputs, self.ranks):
                micro_batch = {port.name: [parts[rank][i] for rank in ranks] for i, port in enumerate(ports)}
                micro_batches.append(micro_batch | {name: seed * len(ranks) for name, seed in drawn.items() if seed})
        return inputs

    def _once(self, program: Program, inputs: dict[str, list[Tensor]], ranks: list[int]) -> dict[str, list[Tensor]]:
        """Runs one of a device's programs on its ranks; returns the results by the names of the inputs."""
        with float64():
            results = run_lockstep(program, [list(parts) for parts in zip(*inputs.values())], ranks=ranks)
        return {name: list(parts) for name, parts in zip(inputs, zip(*results))}

    def _everywhere(self, sums: list[dict[str, list[Tensor]]]) -> Parts:
        """Every rank's shards of all gradients: those of all pipeline devices, added up if several have a parameter."""
        shards: Parts = [[] for _ in range(self.mesh.ranks)]
        for name in self.programs.trained:
            had = [own[name + SUM] for own in sums if name + SUM in own]
            total = [torch.stack(parts).sum(0) for parts in zip(*had)]
            for ranks in self.ranks:
                for rank, part in zip(ranks, total):
                    shards[rank].append(part)
        return shards
