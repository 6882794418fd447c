"""Running one step of a pipeline by its table: runs the programs of each stage, and carries values between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor
from tpshard.parallelism.mesh import Axis, Mesh
from tpshard.parallelism.pipeline.schedules import StageTask, Table
from tpshard.parallelism.pipeline.stages import Stage
from tpshard.parallelism.program import Port, Program
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
        self, table: Table, stages: Sequence[Stage], call: Callable[[Program, StageTask, list[T]], list[T]],
        mail: Carrier[T], params: Mapping[str, T], sums: dict[str, T], batches: Sequence[Mapping[str, T]],
    ):  # fmt: skip
        """params: the parameters by name. sums: gradient sums by port (`NAME.grad_sum`), updated in place. batches: one
        per micro-batch, with its seed if a program has one."""
        self.table, self.stages, self.call, self.mail = table, stages, call, mail
        self.params, self.sums, self.batches = params, sums, batches
        self.saved: dict[tuple[int, int], dict[str, T]] = {}
        """The values that backward passes will read, by stage and micro-batch."""
        self.scalars: dict[int, list[T]] = {}
        """The scalar results of the last stage, loss and number of tokens, by micro-batch."""

    def do(self, task: StageTask) -> None:
        """Runs the program of a task, and sends, saves or returns its results."""
        program = program_of(self.stages, task)
        results = self.call(program, task, [self._input(port, task) for port in program.inputs])
        key = (task.stage, task.micro)
        read_later = self._read_later(task)
        saved = {name: value for name, value in self.saved.pop(key, {}).items() if name in read_later}
        for port, value in zip(program.outputs, results, strict=True):
            if port.kind == "gradient":
                self.sums[port.name] = value
            elif port.kind == "saved":
                saved[port.name] = value
            elif port.kind == "sent":
                self.mail.send(task, port, value)
            else:
                self.scalars.setdefault(task.micro, []).append(value)
        if saved:
            self.saved[key] = saved

    def _input(self, port: Port, task: StageTask) -> T:
        match port.kind:
            case "parameter":
                return self.params[port.name]
            case "gradient":
                return self.sums[port.name]
            case "batch" | "seed":
                return self.batches[task.micro][port.name]
            case "received":
                return self.mail.receive(task, port)
        return self.saved[task.stage, task.micro][port.name]

    def _read_later(self, task: StageTask) -> set[str]:
        """The saved values that later programs read."""
        later = self.stages[task.stage].backward[1:] if task.kind == "I" else ()
        return {port.name for program in later for port in program.inputs if port.kind == "saved"}


def program_of(stages: Sequence[Stage], task: StageTask) -> Program:
    """The program of a task."""
    stage = stages[task.stage]
    return stage.forward if task.kind == "F" else stage.backward[1 if task.kind == "W" else 0]


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
    table: Table, stages: Sequence[Stage], axis: Axis, params: Sequence[Mapping[str, Parts]],
    sums: Sequence[dict[str, Parts]], batches: Sequence[Sequence[Mapping[str, Parts]]],
) -> dict[int, list[Parts]]:  # fmt: skip
    """Runs a whole step in this process, all ranks of a stage in lock-step; returns the scalar results by micro-batch.

    params, sums (updated in place) and batches are those of each device of the table, with a tensor per rank (see
    `ranks_of`). RuntimeError if a sent value is never received.
    """
    mesh, box = stages[0].forward.mesh, _Box()
    walks = []
    for device in range(table.devices):
        ranks = ranks_of(mesh, axis, device)

        def call(program: Program, task: StageTask, inputs: list[Parts], ranks: list[int] = ranks) -> list[Parts]:
            by_rank = run_lockstep(program, [[value[i] for value in inputs] for i in range(len(ranks))], ranks=ranks)
            return [list(parts) for parts in zip(*by_rank)]

        walks.append(Walk(table, stages, call, box, params[device], sums[device], batches[device]))
    for task in table.in_order:
        walks[table.device_of(task.stage)].do(task)
    left = [*box.waiting, *(key for walk in walks for key in walk.saved)]
    if left:
        raise RuntimeError(f"{left[0]} was sent but never received")
    return walks[table.device_of(table.stages - 1)].scalars


def ranks_of(mesh: Mesh, axis: Axis, device: int) -> list[int]:
    """The ranks at one position on the pipeline's axis."""
    return [rank for rank in range(mesh.ranks) if mesh.index(axis, rank) == device]
