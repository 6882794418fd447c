"""Running one step of a pipeline by its table: runs the programs of each stage, and carries values between them."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor
from tpshard.parallelism.mesh import Axis, Mesh
from tpshard.parallelism.pipeline.schedules import StageTask, Table
from tpshard.parallelism.pipeline.stages import Stage
from tpshard.parallelism.program import Port, PortKey, Program
from tpshard.parallelism.simulate import run_lockstep

T = TypeVar("T")

RECEIVES_AHEAD = 2
"""Number of tasks for which a device posts the receives before it runs them."""


class Carrier(Protocol[T]):
    """The interface for sending to and receiving from other stages."""

    def receive(self, task: StageTask, port: Port) -> T:
        """The value of a `received` input."""
        ...

    def send(self, task: StageTask, port: Port, value: T) -> None:
        """Sends a `sent` output."""
        ...


class Walk(Generic[T]):
    """Runs the tasks of one device in a step, one at a time, with the inputs and results of each.

    `T` is a tensor, or in a simulation a list with one per rank of the stage. `call(program, task, inputs)` runs a
    program.
    """

    def __init__(
        self, stages: Sequence[Stage], call: Callable[[Program, StageTask, list[T]], list[T]], mail: Carrier[T],
        params: Mapping[PortKey, T], sums: dict[PortKey, T], batches: Sequence[Mapping[PortKey, T]] = (),
    ):  # fmt: skip
        """params: the parameters, which may also be in `sums`. sums: has the gradient sums, which are updated in place.
        batches: the fields of each micro-batch, with its seed if a program has one; more may be added before their
        tasks run."""
        self.stages, self.call, self.mail = stages, call, mail
        self.params, self.sums, self.batches = params, sums, list(batches)
        self.saved: dict[tuple[int, int], dict[PortKey, T]] = {}
        """The values that backward passes will read, by stage and micro-batch."""
        self.scalars: dict[int, dict[str, T]] = {}
        """The scalar results by name, such as loss and number of tokens, by micro-batch: those of the last stage."""

    def do(self, task: StageTask) -> None:
        """Runs the program of a task, and sends, saves or returns its results."""
        program, key = program_of(self.stages, task), (task.stage, task.micro)
        received = {port.key: self.mail.receive(task, port) for port in program.inputs if port.kind == "received"}
        known = received, self.saved.get(key, {}), self.batches[task.micro], self.params, self.sums
        results = self.call(program, task, program.arguments(ChainMap(*map(dict, known))))
        later = {port.key for each in self._later(task) for port in each.inputs}
        saved = {port: value for port, value in self.saved.pop(key, {}).items() if port in later}
        for port, value in zip(program.outputs, results, strict=True):
            if port.kind == "gradient":
                self.sums[port.key] = value
            elif port.kind == "saved":
                saved[port.key] = value
            elif port.kind == "sent":
                self.mail.send(task, port, value)
            else:
                self.scalars.setdefault(task.micro, {})[port.name] = value
        if saved:
            self.saved[key] = saved

    def _later(self, task: StageTask) -> Sequence[Program]:
        """The programs that still read what the micro-batch saved."""
        return self.stages[task.stage].backward[1:] if task.kind == "I" else ()


def program_of(stages: Sequence[Stage], task: StageTask) -> Program:
    """The program of a task."""
    stage = stages[task.stage]
    return stage.forward if task.kind in "FM" else stage.backward[1 if task.kind == "W" else 0]


def neighbour(task: StageTask) -> int:
    """The stage that receives what a task sends."""
    return task.stage + (1 if task.kind == "F" else -1)


# ---- all devices in one process --------------------------------------------------------------------------------------
Parts = list[Tensor]
"""A value on every rank of a stage."""


class _Box:
    """A `Carrier` between stages within one process, which keeps sent values until they are received."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[str, str, int, int], Parts] = {}

    def receive(self, task: StageTask, port: Port) -> Parts:
        return self.waiting.pop((_way(task), port.name, task.stage, task.micro))

    def send(self, task: StageTask, port: Port, value: Parts) -> None:
        self.waiting[_way(task), port.name, neighbour(task), task.micro] = value


def _way(task: StageTask) -> str:
    return "ahead" if task.kind == "F" else "back"


def simulate_step(
    table: Table, stages: Sequence[Stage], axis: Axis | None, values: Sequence[Mapping[PortKey, Parts]],
    batches: Sequence[Sequence[Mapping[PortKey, Parts]]],
) -> tuple[list[dict[PortKey, Parts]], dict[int, dict[str, Parts]]]:  # fmt: skip
    """Runs a whole step in this process, all ranks of a stage in lock-step; returns each device's gradient sums, and
    the scalar results by micro-batch and name.

    values (parameters and gradient sums) and batches are those of each device of the table, with a tensor per rank (see
    `ranks_of`). RuntimeError if a sent value is never received.
    """
    mesh, box = stages[0].forward.mesh, _Box()
    walks = []
    params, sums = ([{key: value for key, value in own.items() if key[0] == kind} for own in values]
                    for kind in ("parameter", "gradient"))  # fmt: skip
    for device in range(table.devices):
        ranks = ranks_of(mesh, axis, device)

        def call(program: Program, task: StageTask, inputs: list[Parts], ranks: list[int] = ranks) -> list[Parts]:
            by_rank = run_lockstep(program, [[value[i] for value in inputs] for i in range(len(ranks))], ranks=ranks)
            return [list(parts) for parts in zip(*by_rank)]

        walks.append(Walk(stages, call, box, params[device], sums[device], batches[device]))
    for task in table.in_order:
        walks[table.device_of(task.stage)].do(task)
    left = [*box.waiting, *(key for walk in walks for key in walk.saved)]
    if left:
        raise RuntimeError(f"{left[0]} was sent but never received")
    return sums, walks[table.device_of(table.stages - 1)].scalars


def ranks_of(mesh: Mesh, axis: Axis | None, device: int) -> list[int]:
    """The ranks at one position on the pipeline's axis; without one, all."""
    return [rank for rank in range(mesh.ranks) if axis is None or mesh.index(axis, rank) == device]
