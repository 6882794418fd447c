"""A training run of all ranks in this process, in lock-step and float64, for comparing two ways to train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tpshard.parallelism.program import Port, Program
from tpshard.parallelism.simulate import cut, join, run_lockstep
from tpshard.programs.compare.float64 import float64
from tpshard.programs.parts.step_programs import SUM, seeds
from tpshard.programs.step.training import TrainingPrograms

Parts = list[list[Tensor]]
"""The local tensors of each rank."""


@dataclass(frozen=True)
class StepValues:
    """The results of one optimizer step as whole tensors, in float64."""

    loss: float
    """Loss per target token."""
    grad_norm: float
    gradients: dict[str, Tensor]


class Lockstep:
    """Trains all ranks of a recipe together in this process, in the steps of the training loop.

    Weights are normal random numbers of deviation 0.2. Tokens are uniform over `vocab`; a task without text (`vocab` is
    None) generates its own rows. Both are the same for every mesh with the same parameters and sequences per step.
    """

    def __init__(self, programs: TrainingPrograms, vocab: int | None):
        self.programs, self.setting, self.vocab = programs, programs.setting, vocab
        self.mesh, self.names = programs.setting.mesh, programs.names
        self.stored, self.ports = programs.stored, programs.update.inputs
        random = torch.Generator().manual_seed(0)
        single = {n: torch.randn(p.shape, generator=random, dtype=torch.float64) * 0.2
                  for n, p in self.setting.single.named_parameters()}  # fmt: skip
        whole = [self.stack(port.name, single) for port in self.stored]
        moments = [port for port in self.ports if port.kind == "optimizer"]
        zeros = [torch.zeros(p.shape, dtype=torch.float64) for p in moments]
        self.params = self.local(whole, self.stored)
        self.moments = self.local(zeros, moments)
        self.random = torch.Generator().manual_seed(1)
        self.drawn = 0
        self.counted: Parts = []
        self.number = 0

    def local(self, tensors: Sequence[Tensor], ports: Sequence[Port]) -> Parts:
        """Every rank's shards of global tensors."""
        pairs = list(zip(tensors, ports, strict=True))
        return [[cut(t, p.layout, self.mesh, rank) for t, p in pairs] for rank in range(self.mesh.ranks)]

    def join(self, ports: Sequence[Port], parts: Parts) -> dict[str, Tensor]:
        """Global tensors by parameter, with stacked parameters split into those of single layers."""
        whole = {
            port.name.removesuffix(SUM): join(port, self.mesh, [part[i] for part in parts])
            for i, port in enumerate(ports)
        }
        return {name: one for stacked, tensor in whole.items() for name, one in self._single(stacked, tensor)}

    def stack(self, name: str, single: Mapping[str, Tensor]) -> Tensor:
        """A parameter of the programs, stacked from those of single layers if the pipeline is vectorized."""
        members = self.setting.members(name)
        return single[name] if members is None else torch.stack([single[member] for member in members])

    def _single(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters of single layers out of a parameter of the programs: the inverse of `stack`."""
        members = self.setting.members(name)
        yield from [(name, tensor)] if members is None else zip(members, tensor)

    def batches(self) -> list[list[Tensor]]:
        """The fields of each micro-batch of the next step, all data ranks' rows together, floats in float64.

        The order is the same on any mesh.
        """
        plan, fields = self.setting.batch, self._rows()
        shape = plan.data_ranks, plan.micro_batches, plan.per_device
        dealt = [t.unflatten(0, shape).transpose(0, 1).flatten(1, 2) for t in fields.values()]
        return [[field[micro] for field in dealt] for micro in range(plan.micro_batches)]

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

    def sums(self) -> tuple[Parts, float, int]:
        """The gradients of one step as inputs of the update, its summed loss, and its number of targets."""
        programs, count = self.programs, len(self.programs.trained)
        used = self.params if programs.gather is None else run(programs.gather, self.params)
        shapes = [p.local for p in programs.micro.inputs if p.kind == "gradient"]
        ports = [p for p in programs.micro.inputs if p.kind == "batch"]
        sums = [[torch.zeros(shape, dtype=torch.float64) for shape in shapes] for _ in range(self.mesh.ranks)]
        loss, targets, self.counted = 0.0, 0, []
        for micro, fields in enumerate(self.batches()):
            batch = self.local(fields, ports)
            seed = seeds(self.setting, programs.micro, self.number, micro)
            outs = run(programs.micro, [[*u, *s, *b, *seed] for u, s, b in zip(used, sums, batch)])
            sums = [out[2 : 2 + count] for out in outs]
            self.counted.append([torch.cat(out[2 + count :]) for out in outs if len(out) > 2 + count])
            loss, targets = loss + float(outs[0][0]), targets + int(outs[0][1])
        return (sums if programs.reduce is None else run(programs.reduce, sums)), loss, targets

    def step(self, lr: float = 1e-2) -> StepValues:
        """Runs one whole optimizer step."""
        self.number += 1
        trained, places = self.programs.trained, [self.names.index(name) for name in self.programs.trained]
        count = len(trained)
        sums, loss, targets = self.sums()
        gradients = self.join(self.ports[count : 2 * count], sums)
        scalars = [torch.tensor(value, dtype=torch.float64) for value in (loss, targets, lr, self.number)]
        held = [[params[i] for i in places] for params in self.params]
        outs = run(self.programs.update, [[*p, *s, *m, *scalars] for p, s, m in zip(held, sums, self.moments)])
        for params, out in zip(self.params, outs):
            for i, new in zip(places, out):
                params[i] = new
        *_, norm, _ = outs[0]
        self.moments = [out[count:-2] for out in outs]
        return StepValues(loss / max(1, targets), float(norm), gradients)

    def weights(self) -> dict[str, Tensor]:
        """The current parameters as whole tensors."""
        return self.join(self.stored, self.params)


def run(program: Program, arguments: Parts) -> Parts:
    """Every rank's results of a program, computed in float64."""
    with float64():
        return run_lockstep(program, arguments)
