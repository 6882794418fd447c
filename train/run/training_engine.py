"""A model on one rank with its optimizer: its shards of parameters, gradient sums and moments, and its counters."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from tpshard.parallelism.pricing.fusion import Compiled
from tpshard.parallelism.program import Port, Program
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Executor
from tpshard.parallelism.runtime.mail import Mail
from tpshard.parallelism.runtime.step_profile import StepProfile
from tpshard.parallelism.runtime.tally import Tally
from tpshard.parallelism.sharding import Layout
from tpshard.parallelism.simulate import block, cut
from tpshard.programs.parts.pass_choices import compiled_by
from tpshard.programs.parts.step_programs import seeds, trained_by
from tpshard.programs.step.training import TrainingPrograms
from tpshard.train.checkpoints.checkpoint import OPTIMIZER
from tpshard.train.checkpoints.shards import Shard
from tpshard.train.data.step_batch import StepBatch

COUNTED = 2
"""The step of an attempt whose bytes are counted, which slows it down. Not the first, which allocates the state."""

EVALUATION = "evaluation"
"""The part of programs that are not of a step."""

InitialBlock = Callable[..., Tensor]
"""(name, starts, sizes, seed=, dtype=) -> that block of a parameter's initial value."""

ReadBlock = Callable[[str, Sequence[int], Sequence[int]], Tensor]
"""A function (name, starts, sizes) -> that block of a global tensor, from a checkpoint or an initial value."""


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, the same on every rank."""

    losses: tuple[float, ...]
    """Loss of each micro-batch in nats per token, over all data ranks."""
    loss: float
    """Loss of the whole step, in nats per token."""
    targets: int
    """Target tokens."""
    grad_norm: float
    """Global norm of the gradients, before clipping."""
    updated: bool
    """False where loss or gradient was not finite, or there was no target."""
    counted: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The model's counters over the whole step and all data ranks, by path and label."""

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are finite."""
        return self.updated or (self.empty and math.isfinite(self.loss) and math.isfinite(self.grad_norm))

    @property
    def empty(self) -> bool:
        """Whether no token of the step has a target, on any rank: such a step changes nothing."""
        return self.targets == 0


class TrainingEngine(ABC):
    """Forward, backward and update of a model on this rank. Every tensor is this rank's shard in the layout of the
    program's ports, padded if uneven."""

    def __init__(
        self, programs: TrainingPrograms, context: Context, initial_block: InitialBlock, stored: Sequence[Port],
        update: Program, sums: Sequence[Port], trains: bool = True,
    ):  # fmt: skip
        """stored: this rank's parameters. update: takes those that are trained, their gradient sums and moments, in
        this order. sums: the gradient sums as micro-batches produce them. trains: whether there are gradients and
        moments; evaluating needs none."""
        self.programs, self.context, self.initial_block = programs, context, initial_block
        self.compiled = compiled_by(programs.setting.recipe)
        self.executors: list[Executor] = []
        """The executors whose waiting time is measured."""
        self.ports, trained = stored, trained_by(update)
        places = {port.name: i for i, port in enumerate(stored)}
        self.places = [places[name] for name in trained]
        """The indices in `params` of the trained parameters."""
        self.batch_ports = [port for port in programs.micro.inputs if port.kind == "batch"]
        self.kept = programs.setting.moments(trained) if trains else []
        """(moment, parameter) of each moment."""
        self.params = self._zeros(self.ports)
        self.sums = self._zeros(sums if trains else [])
        self.moments = self._zeros([port for port in update.inputs if port.kind == "optimizer" and trains])
        self._steps = 0
        self._tally: Tally | None = None
        self.flops_per_sequence = programs.micro.useful_flops // self.batch_ports[0].shape[0]
        """Floating-point operations of forward and backward for one sequence, over all devices."""

    def _executor(self, program: Program, *, compiled: Compiled = "none", mail: Mail | None = None) -> Executor:
        self.executors.append(Executor(program, self.context, compiled=compiled, mail=mail))
        return self.executors[-1]

    def _zeros(self, ports: Sequence[Port]) -> list[Tensor]:
        return [torch.zeros(port.local, dtype=port.dtype, device=self.context.device) for port in ports]

    # ---- which part of the data is this rank's ---------------------------------------------------------------
    @property
    def data_rank(self) -> int:
        """The part of a step's rows that this rank reads, from 0; ranks that share a part (tensor parallelism) read the
        same."""
        return self.context.mesh.linear_index(self.batch_ports[0].layout.dims[0], self.context.rank)

    @property
    def exposed_comm_s(self) -> float | None:
        """Seconds spent waiting for communication since the last reading; None where it cannot be measured."""
        if self.context.device.type != "cpu" or self.compiled == "all":  # the compiler's code waits unobserved
            return None
        waited = sum(e.waited_s for e in self.executors)
        for executor in self.executors:
            executor.waited_s = 0.0
        return waited

    @property
    def sent_bytes(self) -> int | None:
        """Bytes that this rank sends per step, as counted in an early step; None before it is counted."""
        return None if self._tally is None or self._steps < COUNTED else self._tally.sent_bytes

    @property
    def collectives(self) -> int | None:
        """Collectives that this rank issues per step, as counted; None before they are counted."""
        return None if self._tally is None or self._steps < COUNTED else self._tally.collectives

    @property
    def peak_bytes(self) -> int | None:
        """Peak bytes of all tensors in the counted step; None before it, and where a compiler allocates."""
        unseen = self.compiled != "none" or self._steps < COUNTED
        return None if self._tally is None or unseen else self._tally.peak_bytes

    def profile(self, profile: StepProfile | None) -> None:
        """Lets all programs record their operations in `profile`; None ends it."""
        for executor in self.executors:
            executor.profile = profile if executor.part != EVALUATION else None

    def _counting(self) -> AbstractContextManager[object]:
        """A context that counts the bytes sent and held, if this step is the counted one."""
        if self._steps != COUNTED - 1:
            return nullcontext()
        if self._tally is None:
            self._tally = Tally([*self.params, *self.sums, *self.moments])
        return self._tally

    # ---- one step -------------------------------------------------------------------------------------------
    @abstractmethod
    def accumulate(self, batch: StepBatch, seed: int) -> None:
        """Runs forward and backward of one micro-batch, and adds up gradients, loss and tokens.

        seed: for the random numbers that the model draws in this step.
        """

    @abstractmethod
    def update(self, lr: float, number: int) -> StepResult:
        """Runs update number `number` (from 1) on the accumulated gradients, and resets them."""

    @abstractmethod
    def evaluate(self, batch: StepBatch) -> tuple[float, int]:
        """(summed loss in nats, number of targets) of one micro-batch, over all data ranks."""

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that the update changes."""
        return [self.params[place] for place in self.places]

    # ---- results of a step -----------------------------------------------------------------------------------
    def _store_update(self, results: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Stores an update's results; returns the gradient norm and whether all was finite."""
        self._steps += 1
        count = len(self.places)
        for place, result in zip(self.places, results):
            self.params[place] = result
        self.moments = list(results[count : count + len(self.moments)])
        for total in self.sums:
            total.zero_()
        norm, finite = results[-2:]
        return norm, finite

    def _result(
        self, losses: Tensor, counts: Tensor, norm: Tensor, finite: Tensor, counted: Tensor | None
    ) -> StepResult:
        """The result of an update, with its loss, tokens and gradient norm. `losses` and `counts` are per micro-batch,
        `counted` is the sum of the model's counters.
        """
        each, targets = losses.double() / counts.clamp(min=1), int(counts.sum())
        mean = float(losses.double().sum()) / max(1, targets)
        named: dict[str, list[float]] = {}
        if counted is not None:
            sizes = self.programs.counted
            named = {name: part.tolist() for name, part in zip(sizes, counted.split(list(sizes.values())))}
        return StepResult(tuple(each.tolist()), mean, targets, float(norm), bool(finite), named)

    def _scalar(self, value: float) -> Tensor:
        return torch.tensor(float(value), device=self.context.device)

    def _local(self, batch: StepBatch, program: Program, seed: int, micro: int) -> Iterator[Tensor]:
        """The inputs of one program from a micro-batch of this data rank; other sharded dims are cut here.

        A seed follows for a program that draws random numbers.
        """
        for name, port in zip(self.programs.setting.task.fields, self.batch_ports):
            rows = batch[name]
            assert rows.shape[0] == port.local[0], f"{rows.shape[0]} rows for a program of {port.local[0]}"
            rest = Layout(((), *port.layout.dims[1:]))
            yield cut(rows, rest, self.context.mesh, self.context.rank).to(self.context.device)
        for tensor in seeds(self.programs.setting, program, seed, micro):
            yield tensor.to(self.context.device)

    # ---- state -----------------------------------------------------------------------------------------------
    def _named_tensors(self) -> Iterator[tuple[str, Port, Tensor]]:
        """(prefix of the name in checkpoints, port of the parameter, tensor) of every parameter and moment."""
        ports = {port.name: port for port in self.ports}
        yield from (("", port, tensor) for port, tensor in zip(self.ports, self.params))
        for (state, name), tensor in zip(self.kept, self.moments, strict=True):
            yield f"{OPTIMIZER}{state}/", ports[name], tensor

    def named_shards(self, prefix: str, port: Port, tensor: Tensor) -> Iterator[tuple[str, Shard]]:
        """Yields this rank's part of a tensor by the names in checkpoints, where a stacked tensor is one per layer."""
        pairs = block(port.shape, port.layout, self.context.mesh, self.context.rank)
        starts, sizes = tuple(start for start, _ in pairs), tuple(size for _, size in pairs)
        if not all(sizes):  # with uneven sizes the last ranks may hold only padding
            return
        inside, members = tensor[tuple(slice(0, n) for n in sizes)], self.programs.setting.members(port.name)
        if members is None:
            yield prefix + port.name, Shard(inside, port.shape, starts)
            return
        for layer, one in zip(members[starts[0] :], inside):
            yield prefix + layer, Shard(one, port.shape[1:], starts[1:])

    def tensors(self) -> dict[str, Shard]:
        """This rank's blocks of parameters (by name) and moments (`optimizer/exp_avg/NAME`, ...)."""
        return dict(pair for named in self._named_tensors() for pair in self.named_shards(*named))

    def stored_shapes(self) -> Mapping[str, tuple[Sequence[int], torch.dtype]]:
        """Global shape and dtype of every tensor of `tensors`, the same on every rank."""
        setting = self.programs.setting
        return {
            prefix + name: (setting.shape_in_layer(port.name, port.shape), tensor.dtype)
            for prefix, port, tensor in self._named_tensors()
            for name in setting.members(port.name) or [port.name]
        }

    def load(self, read: ReadBlock) -> None:
        """Sets parameters and moments block by block."""
        for prefix, port, tensor in self._named_tensors():
            self._fill(prefix, port, tensor, read)

    def initialize(self, seed: int) -> None:
        """Sets parameters to their initial values (the same on every mesh) and moments to zero."""
        for port, tensor in zip(self.ports, self.params):
            self._fill("", port, tensor, partial(self.initial_block, seed=seed, dtype=port.dtype))
        for tensor in self.moments:
            tensor.zero_()

    def _fill(self, prefix: str, port: Port, tensor: Tensor, read: Callable[..., Tensor]) -> None:
        """Reads this rank's part of a tensor, by the names, starts and sizes of its blocks in checkpoints."""
        tensor.zero_()
        for name, shard in self.named_shards(prefix, port, tensor):
            shard.tensor[...] = read(name, shard.starts, tuple(shard.tensor.shape)).to(shard.tensor)
